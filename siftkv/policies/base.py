"""What a policy is: it decides in which tier each token lives. It knows nothing of pages, kernels or the engine.

A policy answers four questions:

- `tiers(...)`: which formats it needs, most precise first;
- `rows(n)`: which query rows of a prompt of `n` tokens its importance is measured from;
- `classify(prompt)`: the tier of every prompt token of one layer that is not a sink or in the recent window;
- `decode_rule(...)`: thresholds and caps, as tensors, from which the decode kernel classes tokens without asking again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.kernels.ranking import Ranking, WorthRule
from siftkv.kernels.state import UNLIMITED as UNLIMITED

DROPPED = -1


@dataclass(frozen=True)
class PromptView:
    """One layer of `R` prompts of the same length `n`, or padded to it, under one policy, as that policy sees them.

    layer: index. score: fp32 `[R, H, n]`, mean attention from later queries (zeros if the policy asked for no rows).
    protected: bool `[n]` (`[R, n]` of padded prompts), tokens that stay in the window whatever the policy says.
    q: `[R, n, Hq, D]`, k, v: `[R, n, H, D]`, after RoPE; views that belong to the engine. None where a caller has only
        scores.
    measure: `measure(rows, weight) -> fp32 [R, H, n]`, the importance that other query rows give; arguments as `rows`
        of a policy returns them.
    rotary: cos and sin, fp32 `[P, D/2]`, of every position of the model. layers: of the model.
    places: int64 `[n]`, positions of the tokens, where several prompts are seen as one (`Policy.positional`); None =
        token `i` stands at position `i`.
    lengths: of the prompts, where they are padded in front, so that all end together (`Policy.padded`); what stands
        there is protected and may be anything. None = all are `n` long.
    """

    layer: int
    score: Tensor
    protected: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    measure: Callable[[Tensor, Tensor], Tensor] | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    layers: int = 1
    places: Tensor | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        return self.score.shape[-1]

    @property
    def position(self) -> Tensor:
        """int64 `[n]`."""
        return torch.arange(self.length, device=self.score.device) if self.places is None else self.places


@dataclass(frozen=True)
class RankedPrompts:
    """One layer of `R` neighbouring prompts of any lengths under one policy, which kernels rank by its `WorthRule`.

    layer: index. layers: of the model. lengths: of the prompts. heads: kv heads. rank: `rank(width)` counts tokens on
        so many levels of worth, and places them when it is told how many go where.
    """

    layer: int
    layers: int
    lengths: tuple[int, ...]
    heads: int
    rank: Callable[[int], Ranking]


@dataclass(frozen=True)
class Prices:
    """What tokens of one head cost in a cache, in physical bytes.

    token: a token in each of the policy's tiers, in full pages. page: one page, of which half is lost a tier, on
        average. slot: a head's window and its share of every table. full: a token at 16 bits.
    costs: of each layer, what the model's answers lose where it alone loses tokens, in nats a token
        (`siftkv.engine.layer_costs`); empty where that was not measured.
    """

    token: tuple[float, ...]
    page: float
    slot: float
    full: float
    costs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sifted:
    """What a policy makes of a layer of prompts.

    tier: int8 `[R, H, n]`, as `Policy.classify` returns it; `[H, T']` of `RankedPrompts`, end to end. score: fp32 in
        the shape of `tier`, what is kept as the tokens' mean attention instead of what was measured. share: fp32 `[R,
        H, t]`, the most that each tier may hold from now on, by the tokens that the request has seen; where it is None
        the decode rule's caps stand alone.
    """

    tier: Tensor
    score: Tensor | None = None
    share: Tensor | None = None


@dataclass(frozen=True)
class DecodeRule:
    """The rule of the decode step, for each tier of the policy in order (`siftkv.kernels.reference.sift` says how it
    runs).

    alpha: fp32 `[L, H, t]`; a tier takes tokens whose mean attention is at least `alpha / N` (N tokens so far), and its
        weakest token below that moves down.
    cap: int64 `[L, H, t]`, tokens that the tier may hold a head; 0 closes it.
    refresh: scores are refreshed every so many positions (0 = never). catch_up: 1 to examine each tier's weakest token
        in every step, not only where a token enters.
    share: fp32 `[L, H, t]`; a tier holds at most `ceil(share * N)` tokens a head after `N` tokens, rounded up to whole
        pages, and no more than its cap. None = caps do not grow with the request.
    horizon: how many later queries a score is the mean of, at least 1; an older token's mean forgets what lies further
        back.
    """

    alpha: Tensor
    cap: Tensor
    refresh: int = 0
    catch_up: int = 0
    share: Tensor | None = None
    horizon: int = UNLIMITED


class Policy(ABC):
    """Base of all policies. Subclasses are frozen dataclasses whose fields are the settings a `kv` string may name."""

    name: ClassVar[str]
    """The word before the colon of a `kv` string."""
    exact_window: ClassVar[bool] = False
    """Whether a pool opened for this policy keeps windows of its size and no larger ones, because it counts them."""
    any_window: ClassVar[bool] = False
    """Whether the window only says where tokens stand, not what they are: a pool with smaller windows does as well."""

    positional: ClassVar[bool] = False
    """Whether `classify` looks at each token's layer, position and score alone: prompts of any lengths may be seen as
    one."""
    padded: ClassVar[bool] = False
    """Whether `classify` takes prompts of different lengths, padded in front to the longest (`PromptView.lengths`)."""

    window: int
    """Recent tokens kept at 16 bits."""
    sinks: int
    """First tokens kept at 16 bits and never dropped."""

    @property
    def query_rows(self) -> int:
        """Recent queries of every layer that the policy reads while decoding; 0 = none are kept."""
        return 0

    @property
    def skips(self) -> bool:
        """Whether the policy tells attention to ignore single pages."""
        return False

    @property
    def weighs_layers(self) -> bool:
        """Whether the policy asks what each layer's errors cost the model (`Prices.costs`)."""
        return False

    @abstractmethod
    def tiers(self, dense: str) -> tuple[Tier, ...]:
        """Tiers the policy places tokens in, most precise first. `dense` names the model's own 16/32-bit format."""

    def rows(self, length: int) -> tuple[Tensor, Tensor] | None:
        """Query rows (int64 `[M]`, ascending) of a prompt and their weights (fp32 `[M]`) for the importance; None = no
        scores are needed.
        """
        return None

    @abstractmethod
    def classify(self, prompt: PromptView) -> Tensor:
        """Tier (int8 `[R, H, n]`, index into `tiers()`, -1 = dropped) of each token of `prompt`."""

    def sift(self, prompt: PromptView, prices: Prices) -> Sifted:
        """`classify`, for policies that learn more from a prompt or keep to a budget of bytes."""
        return Sifted(self.classify(prompt))

    @property
    def worth_rule(self) -> WorthRule | None:
        """What ranks tokens, where kernels may do it for many prompts at once: then `sift_ranked` takes `sift`'s
        place.
        """
        return None

    def sift_ranked(self, prompts: RankedPrompts, prices: Prices) -> Sifted:
        """`sift` of prompts of any lengths, for policies with a `worth_rule`."""
        raise NotImplementedError

    @abstractmethod
    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        """Thresholds and caps of decoding. Raises PolicyError when per-head settings do not fit the model."""

    def check_context(self, max_len: int) -> None:  # noqa: B027 - most policies have nothing to check
        """Raise PolicyError when settings make no sense for contexts of at most `max_len` tokens."""

    def check_prices(self, prices: Prices) -> None:  # noqa: B027
        """Raise PolicyError when settings make no sense for what tokens cost in this cache."""

    def for_model(self, fingerprint: Callable[[], str]) -> Policy:
        """The policy that runs on a model, whose fingerprint is computed when it is asked for. Raises PolicyError for
        settings that were found for another model.
        """
        return self

    def describe(self) -> str:
        """The `kv` string that makes this policy again."""
        settings = ",".join(f"{f.name}={_plain(getattr(self, f.name))}" for f in fields(self))  # type: ignore[arg-type]
        return f"{self.name}:{settings}" if settings else self.name


def _plain(value: object) -> str:
    return "per-head" if isinstance(value, (Sequence, Tensor)) and not isinstance(value, str) else f"{value}"


def check_whole(name: str, value: object, least: int, most: int = UNLIMITED) -> None:
    """Raise PolicyError unless a setting is a whole number from `least` to `most`: by default all a cache counts."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= most:  # type: ignore[operator]
        narrow = most < UNLIMITED or (whole and value > most)  # type: ignore[operator]
        bounds = f"from {least} to {most}" if narrow else f"of {least} or more"
        raise PolicyError(f"{name}={value!r}: use a whole number {bounds}")


def check_window(window: int, sinks: int) -> None:
    """Raise PolicyError unless a policy's window and sinks are usable."""
    check_whole("window", window, 1)
    check_whole("sinks", sinks, 0)


def check_pair(high: str, low: str) -> None:
    """Raise PolicyError unless `high` is a more precise format than `low`: tokens go down from one to the other."""
    formats = []
    for name, value in (("high", high), ("low", low)):
        if not isinstance(value, str):
            raise PolicyError(f"{name}={value!r}: use the name of a format, such as k8v4")
        formats.append(TierFormat.parse(value))
    if formats[0] == formats[1]:
        raise PolicyError(f"high and low are both {high}: use two formats, or uniform:{high} for one")
    if formats[0].precision <= formats[1].precision:
        raise PolicyError(f"high={high} is not more precise than low={low}: swap them")
    if formats[1].key_bits < 4:
        raise PolicyError(f"low={low}: keys of fewer than 4 bits destroy a model, drop such tokens instead (alpha_low)")


Setting = float | Sequence[float] | Sequence[Sequence[float]]
"""A threshold: one number, one a layer, or one a layer and kv head."""


def expand(setting: Setting, name: str, num_layers: int, num_kv_heads: int) -> Tensor:
    """fp32 `[L, H]` of a threshold. Raises PolicyError when its shape does not fit."""
    value = torch.as_tensor(setting, dtype=torch.float32)
    if value.ndim == 1:
        value = value[:, None]
    try:
        return value.expand(num_layers, num_kv_heads).clone()
    except RuntimeError:
        raise PolicyError(
            f"{name} has shape {tuple(value.shape)}: give one number, {num_layers} (one a layer) "
            f"or {num_layers} x {num_kv_heads} (one a layer and kv head)"
        ) from None
