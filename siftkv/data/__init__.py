"""Long public-domain texts that ship with the package, for the demo and for measuring fidelity (see `ORIGIN.md`)."""

from importlib.resources import files

TEXTS = ("a_scandal_in_bohemia", "the_red_headed_league")
"""Names that `read_text` knows. Each is a whole story of about 12,000 tokens."""


def read_text(name: str = TEXTS[0]) -> str:
    """A shipped text. Raises ValueError that lists what there is for another name."""
    if name not in TEXTS:
        raise ValueError(f"there is no text {name!r}: choose {', '.join(TEXTS)}")
    return (files(__name__) / f"{name}.txt").read_text(encoding="utf-8")
