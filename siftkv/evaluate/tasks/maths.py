"""GSM8K, MATH-500, AIME and U-MATH: worked answers whose last expression is compared with the reference's."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

from siftkv.evaluate.tasks.base import Judgement, Problem, Task, after_thinking, read_rows

_ASK = "Reason step by step, and put the final answer in \\boxed{}."


class MathRow(BaseModel):
    """A row in the field names of the public sets. A GSM8K answer is what follows its `####`."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    question: str = Field(validation_alias=AliasChoices("question", "problem", "problem_statement", "Problem"))
    answer: str = Field(validation_alias=AliasChoices("answer", "golden_answer", "Answer"))
    id: str | None = Field(None, validation_alias=AliasChoices("id", "unique_id", "uuid", "ID"))

    @field_validator("answer")
    @classmethod
    def _last_line(cls, answer: str) -> str:
        final = answer.rpartition("####")[2].strip()
        return final.replace(",", "") if "####" in answer else final


class MathTask(Task):
    """Any set of questions with an expression as the answer; math-verify says whether two are the same."""

    module: ClassVar[str] = "math_verify"

    def problems(self, path: str | None, limit: int | None, seed: int) -> list[Problem]:
        assert path is not None
        return [
            Problem(
                task=self.name,
                name=row.id or f"{self.name}-{i}",
                message=f"{row.question}\n\n{_ASK}",
                plain=f"Question: {row.question}\n{_ASK}\nAnswer:",
                stop=("\nQuestion:",),
                gold={"answer": row.answer},
            )
            for i, row in enumerate(read_rows(path, MathRow, limit))
        ]

    def judge(self, problem: Problem, text: str, truncated: bool, chat: bool) -> Judgement:
        from math_verify import parse, verify

        final = after_thinking(text)
        if truncated and "\\boxed" not in final:
            return Judgement(False, False, "")
        found: list[Any] = parse(final)
        if not found:
            return Judgement(False, False, "")
        gold: list[Any] = parse(f"\\boxed{{{problem.gold['answer']}}}")
        return Judgement(bool(verify(gold, found)), True, str(found[-1]))


class GSM8K(MathTask):
    name: ClassVar[str] = "gsm8k"


class Math500(MathTask):
    name: ClassVar[str] = "math500"


class Aime24(MathTask):
    name: ClassVar[str] = "aime24"


class Aime25(MathTask):
    name: ClassVar[str] = "aime25"


class UMath(MathTask):
    name: ClassVar[str] = "umath"
