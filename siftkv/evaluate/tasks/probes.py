"""Format probes: strict JSON and tool calls, made with a seed. Formats break before knowledge does.

What is asked for stands early in a long message, so that a sifted cache has to keep it.
"""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from typing import Any, ClassVar

from siftkv.data import TEXTS, read_text
from siftkv.evaluate.tasks.base import Judgement, Problem, Task, after_thinking, code_blocks

_COUNT = 50
_FILLER = 3000
"""Characters of a story that stand between a probe's facts and its question."""
_FIRST = ("Ada", "Boris", "Chen", "Dana", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
_LAST = ("Abel", "Brandt", "Castro", "Duarte", "Eklund", "Fischer", "Garnier", "Holm", "Ito", "Jansen", "Kowal", "Lund")
_TOWNS = ("Aarhus", "Bergen", "Cork", "Delft", "Essen", "Faro", "Ghent", "Huelva", "Inari", "Jena", "Krakow", "Lyon")
_JOBS = ("baker", "carpenter", "dentist", "engineer", "florist", "geologist", "historian", "nurse", "pilot", "tailor")

TOOLS: tuple[dict[str, Any], ...] = (
    {"name": "book_table", "arguments": {"town": "string", "guests": "integer", "outside": "boolean"}},
    {"name": "send_parcel", "arguments": {"recipient": "string", "town": "string", "weight_kg": "number"}},
    {"name": "find_person", "arguments": {"job": "string", "town": "string"}},
    {"name": "set_alarm", "arguments": {"hour": "integer", "minute": "integer", "label": "string"}},
)


class Probe(Task):
    """A problem whose answer is one JSON object."""

    needs_file: ClassVar[bool] = False

    def problems(self, path: str | None, limit: int | None, seed: int) -> list[Problem]:
        count = _COUNT if limit is None else limit
        return [self._problem(i, random.Random(f"{seed}/{self.name}/{i}")) for i in range(count)]

    def judge(self, problem: Problem, text: str, truncated: bool, chat: bool) -> Judgement:
        value = _json_object(text)
        if value is None:
            return Judgement(False, False, text.strip()[:60])
        return Judgement(_same(value, problem.gold["object"]), True, json.dumps(value))

    def _problem(self, index: int, rng: random.Random) -> Problem:
        facts, question, answer = self._ask(rng)
        story = read_text(TEXTS[index % len(TEXTS)])
        start = rng.randrange(len(story) - _FILLER)
        message = f"{facts}\n\nA text that has nothing to do with it:\n{story[start : start + _FILLER]}\n\n{question}"
        name = f"{self.name}-{index}"
        return Problem(self.name, name, message, f"{message}\nAnswer:", ("\n\n",), {"object": answer})

    @abstractmethod
    def _ask(self, rng: random.Random) -> tuple[str, str, dict[str, Any]]:
        """Facts, question and the object that answers it."""


class StrictJSON(Probe):
    """A record with given keys and types, and nothing else."""

    name: ClassVar[str] = "strict_json"

    def _ask(self, rng: random.Random) -> tuple[str, str, dict[str, Any]]:
        person: dict[str, Any] = {
            "name": f"{rng.choice(_FIRST)} {rng.choice(_LAST)}",
            "age": rng.randrange(20, 80),
            "town": rng.choice(_TOWNS),
            "married": rng.random() < 0.5,
            "languages": rng.sample(("Danish", "English", "French", "German", "Polish", "Spanish"), 2),
        }
        state = "married" if person["married"] else "not married"
        facts = (
            f"{person['name']} is {person['age']} years old, lives in {person['town']}, is {state}, and speaks "
            f"{person['languages'][0]} and {person['languages'][1]}."
        )
        question = (
            f"Describe {person['name']} as one JSON object with exactly these keys: name (string), age (integer), town "
            "(string), married (boolean), languages (list of two strings, in the order given). Answer with the JSON "
            "object only."
        )
        return facts, question, person


class ToolCall(Probe):
    """The right one of four functions, with its arguments."""

    name: ClassVar[str] = "tool_call"

    def _ask(self, rng: random.Random) -> tuple[str, str, dict[str, Any]]:
        tool = rng.choice(TOOLS)["name"]
        town, person = rng.choice(_TOWNS), f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
        guests, hour, minute = rng.randrange(2, 9), rng.randrange(5, 10), rng.randrange(0, 60, 5)
        weight, job, outside = rng.randrange(2, 40) / 2, rng.choice(_JOBS), rng.random() < 0.5
        requests: dict[str, tuple[str, dict[str, Any]]] = {
            "book_table": (
                f"Book a table for {guests} in {town}, {'outside' if outside else 'inside'}.",
                {"town": town, "guests": guests, "outside": outside},
            ),
            "send_parcel": (
                f"Send a parcel of {weight} kg to {person} in {town}.",
                {"recipient": person, "town": town, "weight_kg": weight},
            ),
            "find_person": (f"Find a {job} in {town}.", {"job": job, "town": town}),
            "set_alarm": (
                f"Wake me at {hour}:{minute:02d}, and label the alarm '{town}'.",
                {"hour": hour, "minute": minute, "label": town},
            ),
        }
        request, arguments = requests[tool]
        facts = "You can call these functions:\n" + "\n".join(json.dumps(t) for t in TOOLS)
        question = (
            f"The user says: {request}\nCall the right function: answer with one JSON object with the keys name and "
            "arguments, and nothing else."
        )
        return facts, question, {"name": tool, "arguments": arguments}


def _json_object(text: str) -> dict[str, Any] | None:
    """The object that an answer consists of, in a fence or `<tool_call>` tags at most; None for anything else."""
    answer = after_thinking(text).strip().removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    if answer.startswith("```") and answer.endswith("```") and len(code_blocks(answer)) == 1:
        answer = code_blocks(answer)[0]
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _same(found: Any, wanted: Any) -> bool:
    """Equal in value and type: 1, 1.0 and true differ, but a number may be written without its fraction."""
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(_same(found[key], wanted[key]) for key in wanted)
        )
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(wanted, float):
        return isinstance(found, (int, float)) and not isinstance(found, bool) and found == wanted
    return type(found) is type(wanted) and found == wanted
