"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from siftkv import SamplingParams

_SAMPLING = "Sampling"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A built-in name (see 'siftkv models list'), a folder, a .gguf file or a Hub id."
    ),
]
Kv = Annotated[
    str,
    typer.Option(
        "--kv",
        help="How the KV cache is sifted: full, uniform:k8v4, diffkv, diffkv:alpha_high=1,alpha_low=0.02, ...",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest context in tokens.  [default: the model's]", show_default=False)
]
Conditioning = Annotated[str, typer.Option(help="What makes keys easy to quantise: full, bias or none.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 takes the likeliest token.  [default: what the model's makers recommend, else 0]",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from the likeliest tokens whose probabilities reach this sum.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int | None, typer.Option(help="Draw from this many likeliest tokens; 0 = all.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens below this share of the likeliest one's probability.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 makes tokens already seen less likely.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given several times.", rich_help_panel=_SAMPLING)
]


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling as it was asked for; None where the user said nothing."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1

    def params(self, recommended: Mapping[str, float] | None = None) -> SamplingParams:
        """`SamplingParams` of what was asked, over `recommended`, over greedy decoding.

        Raises RequestError for a value out of range.
        """
        from siftkv import SamplingParams

        asked = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        advice = {k: int(v) if k == "top_k" else v for k, v in (recommended or {}).items()}
        return SamplingParams(**({"temperature": 0.0} | advice | asked))

    def check(self) -> None:
        """Raise RequestError for a value out of range, before anything slow is started."""
        self.params()
