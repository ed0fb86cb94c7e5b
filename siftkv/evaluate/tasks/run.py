"""Task runs: every problem under every setting, continuously batched, judged and recorded as each answer ends."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from siftkv.benchmarks.opening import open_for
from siftkv.engine.llm import LLM
from siftkv.engine.outputs import CompletionOutput
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import RequestError, SiftKVError
from siftkv.evaluate.generation import Request, complete
from siftkv.evaluate.report import cache_fields
from siftkv.evaluate.resume import Records
from siftkv.evaluate.tasks.base import Problem, Task
from siftkv.evaluate.tasks.code import MBPP, HumanEval
from siftkv.evaluate.tasks.maths import GSM8K, Aime24, Aime25, Math500, UMath
from siftkv.evaluate.tasks.probes import StrictJSON, ToolCall
from siftkv.models import LoadedModel
from siftkv.policies import parse_policy

_KINDS: tuple[type[Task], ...] = (GSM8K, Math500, Aime24, Aime25, UMath, HumanEval, MBPP, StrictJSON, ToolCall)
TASKS: dict[str, Task] = {kind.name: kind() for kind in _KINDS}
"""Every task by its name."""
_LEAST_WINDOW = 16


@dataclass(frozen=True)
class Sampling:
    """How answers are generated. Greedy at temperature 0, where repeats beyond the first would be the same.

    max_tokens: of an answer. seed: with a problem's name and the repeat it decides what is drawn, under every setting.
    Raises SiftKVError for repeats of a greedy run, RequestError for a value out of range.
    """

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repeats: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.repeats <= 1000:
            raise SiftKVError(f"repeats={self.repeats}: use 1 to 1000")
        if self.repeats > 1 and self.params("", 0, ()).greedy:
            raise SiftKVError("a greedy run repeats itself: raise the temperature, or leave repeats at 1")

    def params(self, problem: str, repeat: int, stop: tuple[str, ...]) -> SamplingParams:
        """Sampling of one answer."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed + 1000 * zlib.crc32(problem.encode()) + repeat,
            stop=stop or None,
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True)
class Answer:
    """One answer under one setting. tokens: generated. truncated: cut at the limit. seconds: its share of the run's.

    cache: the fields of a `KVReport` at its end, counts by head left out.
    """

    kv: str
    task: str
    problem: str
    repeat: int
    correct: bool
    valid: bool
    truncated: bool
    tokens: int
    seconds: float
    answer: str
    text: str
    cache: dict[str, Any]


def gather(files: Mapping[str, str], made: Sequence[str], limit: int | None, seed: int) -> list[Problem]:
    """Problems of tasks by name: those of `files` are read, those of `made` need no file.

    Raises SiftKVError for an unknown task, a missing file or module, or a file that is no such set.
    """
    problems: list[Problem] = []
    for name, path in {**dict.fromkeys(made), **files}.items():
        task = TASKS.get(name)
        if task is None:
            raise SiftKVError(f"there is no task {name!r}: choose {', '.join(TASKS)}")
        if task.needs_file and path is None:
            raise SiftKVError(f"{name} needs its data set: --data {name}=FILE")
        if not task.needs_file and path is not None:
            raise SiftKVError(f"{name} makes its problems: use --task {name}")
        if task.module and importlib.util.find_spec(task.module) is None:
            raise SiftKVError(f"{name} is judged by {task.module.replace('_', '-')}: pip install 'siftkv[eval]'")
        problems += task.problems(path, limit, seed)
    return problems


def run(
    model: LoadedModel,
    problems: Sequence[Problem],
    settings: Sequence[str],
    sampling: Sampling,
    records: Records,
    batch: int = 8,
    kernels: str = "auto",
    progress: Callable[[], None] = lambda: None,
    memory_bytes: int | None = None,
) -> list[Answer]:
    """Answer what `records` lacks; answers of all, by setting, then problem, then repeat.

    batch: requests at a time. progress: called after each answer. memory_bytes: of the cache; by default what `batch`
    requests of the longest problem could need. Raises PolicyError, FormatError, RequestError, SiftKVError or OutOfPages
    for what does not fit the model or the machine.
    """
    chat = _chats(model)
    for kv in settings:
        left = {key: at for key, *at in _todo(problems, sampling, chat) if records.get(kv, key) is None}
        if left:
            asked = {key: (problems[i], repeat) for key, (i, repeat) in left.items()}
            own = [problem for problem, _ in asked.values()]
            llm = open_engine(model, kv, own, sampling, batch, kernels, memory_bytes)
            for key, output, seconds in generate(llm, asked, sampling):
                records.add(kv, key, judged(problems[left[key][0]], Raw.of(output, seconds), chat))
                progress()
    return list(_answers(problems, settings, sampling, chat, records))


def _chats(model: LoadedModel) -> bool:
    return bool(getattr(model.tokenizer, "chat_template", None))


def pending(
    model: LoadedModel, problems: Sequence[Problem], settings: Sequence[str], sampling: Sampling, records: Records
) -> int:
    """How many answers `records` lacks."""
    chat = _chats(model)
    keys = [key for key, *_ in _todo(problems, sampling, chat)]
    return sum(records.get(kv, key) is None for kv in settings for key in keys)


def _todo(problems: Sequence[Problem], sampling: Sampling, chat: bool) -> Iterator[tuple[str, int, int]]:
    """(record key, problem, repeat) of every answer. The key changes with the question and with how it is sampled."""
    settings = f"{asdict(sampling) | {'repeats': 0}}"
    for i, problem in enumerate(problems):
        asked = problem.message if chat else f"{problem.plain}{problem.stop}"
        asked += f"{problem.examples}" if problem.examples else ""
        digest = zlib.crc32(f"{asked}|{problem.gold}|{settings}".encode())
        for repeat in range(sampling.repeats):
            yield f"{problem.task}/{problem.name}/{repeat}/{digest:08x}", i, repeat


def open_engine(
    model: LoadedModel,
    kv: str,
    problems: Sequence[Problem],
    sampling: Sampling,
    batch: int,
    kernels: str = "auto",
    memory_bytes: int | None = None,
) -> LLM:
    """An engine for one setting, long enough for these problems and their answers, with windows of the policy's size.

    Raises RequestError for a problem beyond the model's context, and what `LLM` raises.
    """
    limit = model.config.context_limit
    longest = max(len(_prompt(model, problem)) for problem in problems)
    if longest >= limit:
        raise RequestError(f"a problem has {longest} tokens and the context of {model.name} holds {limit}")
    policy = parse_policy(kv)
    tokens = min(limit, longest + sampling.max_tokens)
    return open_for(model, policy, tokens, batch, (), kernels, memory_bytes, max(_LEAST_WINDOW, policy.window))


def generate(
    llm: LLM, asked: Mapping[str, tuple[Problem, int]], sampling: Sampling
) -> Iterator[tuple[str, CompletionOutput, float]]:
    """(key, output, seconds) of each problem and repeat, as `siftkv.evaluate.generation.complete` hands them out."""
    chat = _chats(llm.model)
    requests = [
        Request(key, _prompt(llm.model, p), sampling.params(p.name, repeat, () if chat else p.stop))
        for key, (p, repeat) in asked.items()
    ]
    return complete(llm.engine, llm.kv, requests)


def _prompt(model: LoadedModel, problem: Problem) -> list[int]:
    tokenizer: Any = model.tokenizer
    if not _chats(model):
        return list(tokenizer(problem.text())["input_ids"])
    text = tokenizer.apply_chat_template(problem.turns(), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Raw:
    """An answer before it is judged; fields as in `Answer`."""

    text: str
    truncated: bool
    tokens: int
    seconds: float
    cache: dict[str, Any]

    @classmethod
    def of(cls, output: CompletionOutput, seconds: float) -> Raw:
        """What is kept of an output."""
        cache = cache_fields(output.kv.to_dict()) if output.kv else {}
        truncated = output.finish_reason == "length"
        return cls(output.text, truncated, len(output.token_ids), round(seconds, 4), cache)


def judged(problem: Problem, raw: Raw, chat: bool) -> dict[str, Any]:
    """The fields of a record. chat: whether the problem was asked in a conversation."""
    judgement = TASKS[problem.task].judge(problem, raw.text, raw.truncated, chat)
    return asdict(judgement) | asdict(raw)


def _answers(
    problems: Sequence[Problem], settings: Sequence[str], sampling: Sampling, chat: bool, records: Records
) -> Iterator[Answer]:
    names = ("correct", "valid", "truncated", "tokens", "seconds", "answer", "text", "cache")
    for kv in settings:
        for key, i, repeat in _todo(problems, sampling, chat):
            record = records.get(kv, key)
            if record is not None:
                fields = {name: record[name] for name in names}
                yield Answer(kv, problems[i].task, problems[i].name, repeat, **fields)
