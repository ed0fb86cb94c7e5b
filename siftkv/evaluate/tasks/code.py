"""HumanEval and MBPP: Python functions that are run against their tests."""

from __future__ import annotations

import ast
from typing import Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from siftkv.evaluate.code_sandbox import run_code
from siftkv.evaluate.tasks.base import Judgement, Problem, Task, after_thinking, code_blocks, read_rows

_NEXT = ("\ndef ", "\nclass ", "\nif __name__", "\nprint(", "\n```")
"""What ends a function that a plain model continues."""


class HumanEvalRow(BaseModel):
    """A row of the public set. test: defines `check(candidate)`."""

    model_config = ConfigDict(extra="ignore")

    id: str = Field(validation_alias=AliasChoices("id", "task_id"))
    prompt: str
    entry_point: str
    test: str


class MbppRow(BaseModel):
    """A row of the public set, whole or sanitised."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    id: str = Field(validation_alias=AliasChoices("id", "task_id"))
    prompt: str = Field(validation_alias=AliasChoices("prompt", "text"))
    tests: list[str] = Field(validation_alias=AliasChoices("tests", "test_list"))
    setup: str | list[str] = Field("", validation_alias=AliasChoices("test_setup", "test_setup_code", "test_imports"))


class HumanEval(Task):
    """A signature with a docstring, to be completed."""

    name: ClassVar[str] = "humaneval"

    def problems(self, path: str | None, limit: int | None, seed: int) -> list[Problem]:
        assert path is not None
        return [
            Problem(
                task=self.name,
                name=row.id,
                message="Complete this Python function. Answer with the whole function in one Python code block.\n\n"
                f"```python\n{row.prompt.rstrip()}\n```",
                plain=row.prompt,
                stop=_NEXT,
                gold=row.model_dump(),
            )
            for row in read_rows(path, HumanEvalRow, limit)
        ]

    def judge(self, problem: Problem, text: str, truncated: bool, chat: bool) -> Judgement:
        gold = problem.gold
        code = _whole_function(gold["prompt"], gold["entry_point"], text) if chat else gold["prompt"] + text
        tests = f"{gold['test']}\n\ncheck({gold['entry_point']})"
        return _run(code, tests)


class MBPP(Task):
    """A sentence and the tests that the function must pass."""

    name: ClassVar[str] = "mbpp"

    def problems(self, path: str | None, limit: int | None, seed: int) -> list[Problem]:
        assert path is not None
        found = []
        for row in read_rows(path, MbppRow, limit):
            tests = "\n".join(row.tests)
            setup = row.setup if isinstance(row.setup, str) else "\n".join(row.setup)
            message = (
                f"{row.prompt}\nYour code must pass these tests:\n\n```python\n{tests}\n```\n\n"
                "Answer with one Python code block."
            )
            plain = f'"""\n{row.prompt}\n{tests}\n"""\n'
            stop = ("\nassert ", '\n"""', *_NEXT[2:])
            found.append(Problem(self.name, row.id, message, plain, stop, {"tests": tests, "setup": setup}))
        return found

    def judge(self, problem: Problem, text: str, truncated: bool, chat: bool) -> Judgement:
        code = "\n\n".join(code_blocks(after_thinking(text))[:1]) or after_thinking(text) if chat else text
        return _run(code, f"{problem.gold['setup']}\n{problem.gold['tests']}")


def _whole_function(prompt: str, entry_point: str, text: str) -> str:
    """The answer's function with what stands before it in the prompt (imports, helpers); a bare body is put below the
    prompt.
    """
    answer = after_thinking(text)
    signature = f"def {entry_point}("
    blocks = [block for block in code_blocks(answer) if signature in block] or code_blocks(answer)[:1] or [answer]
    if signature not in blocks[0]:
        return prompt + blocks[0]
    return f"{prompt.partition(signature)[0]}\n{blocks[0]}"


def _run(code: str, tests: str) -> Judgement:
    """Judge code by its tests. Valid: it is Python that defines something."""
    try:
        tree: Any = ast.parse(code)
        valid = any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        valid = False
    if not valid:
        return Judgement(False, False, "no Python function")
    result = run_code(f"{code}\n\n{tests}")
    return Judgement(result.verdict == "passed", True, result.verdict)
