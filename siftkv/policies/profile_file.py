"""What `siftkv calibrate` writes and `kv="profile:FILE"` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from siftkv.errors import PolicyError

VERSION: Final = 1
_MOST_BYTES = 1 << 24
"""Largest file that is read."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfiledModel(_Part):
    """The model that settings were found for. fingerprint: of `siftkv.models.fingerprint`."""

    name: str
    fingerprint: str
    architecture: str
    layers: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    dtype: str
    device: str


class Target(_Part):
    """What was asked for, None where nothing was: mean KL in nats a token, physical bytes by those of bf16, share of
    positions where the likeliest token is that of the full cache.
    """

    max_kl: NonNegativeFloat | None = None
    target_ratio: NonNegativeFloat | None = None
    min_agreement: NonNegativeFloat | None = None


class Figures(_Part):
    """Against the full cache, over `positions` tokens: KL in nats a token, agreement 0 to 1, bytes by those of bf16.

    ratio: at the end of windows. per_entry: bytes of one key and value of one head, everything included; unlike the
        ratio it hardly depends on how long a request is.
    """

    positions: PositiveInt
    mean_kl: NonNegativeFloat
    worst_decile_kl: NonNegativeFloat
    agreement: NonNegativeFloat
    ratio: NonNegativeFloat
    per_entry: NonNegativeFloat


class Tried(_Part):
    """A setting on the path of the search. step: what was being found. meets: whether it was good enough for that."""

    step: str
    kv: str
    meets: bool
    figures: Figures


class Keys(_Part):
    """What 4-bit keys do to each head, lists by layer, then kv head: see `siftkv.evaluate.calibrate.fragility`.

    error: of logits, in nats. relative: that by the spread of logits. shift: KL of attention, in nats.
    """

    error: list[list[float]]
    relative: list[list[float]]
    shift: list[list[float]]


class Data(_Part):
    """What was measured on. sha256: first 16 hex digits over all texts. windows: `prompt` tokens, then `forced` fed."""

    texts: list[str]
    sha256: str
    prompt: PositiveInt
    forced: PositiveInt
    windows: PositiveInt
    offset: NonNegativeInt


class Profile(_Part):
    """Settings that reach a target on one model and text.

    policy: a `kv` string. precise_keys: (layer, kv head) pairs whose keys get 8 bits where the policy says 4.
    reached: the figures that the settings were chosen by; held_out: the same on text that played no part in that.
    fragile: (layer, kv head) pairs whose keys stand out. path: every setting that was tried, in order.
    """

    siftkv_profile: Literal[1] = VERSION
    model: ProfiledModel
    conditioning: str
    policy: str
    precise_keys: list[tuple[NonNegativeInt, NonNegativeInt]] = []
    target: Target
    reached: Figures
    held_out: Figures | None = None
    fragile: list[tuple[NonNegativeInt, NonNegativeInt]] = []
    keys: Keys
    data: Data
    path: list[Tried]
    versions: dict[str, str | None]
    date: str

    def write(self, path: str | Path) -> None:
        """Write as JSON. Raises PolicyError when the file cannot be written."""
        try:
            Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise PolicyError(f"cannot write {path}: {error.strerror or error}") from error


def read_profile(path: str | Path) -> Profile:
    """Raises PolicyError for a file that is missing, is no profile, or is one of another version."""
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise PolicyError(f"{path} is too large to be a profile")
        return Profile.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise PolicyError(f"cannot read the profile {path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PolicyError(
            f"{path} is no profile of version {VERSION} ({where}: {first['msg']}): make one with 'siftkv calibrate'"
        ) from None
