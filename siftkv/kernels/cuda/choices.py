"""What was measured to be the fastest on this kind of GPU, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from siftkv.kernels.cuda.compile import cache_folder

_FORMAT = 2
"""Of the file, and of the way in which is measured."""


class ChoiceFile:
    """Names of algorithms by product and rows; None = the library's own choice.

    Of what two processes measure at once, what was written first holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = self._read()

    @classmethod
    def of(cls, device: int, library: int) -> ChoiceFile:
        """Of a kind of GPU and a version of the library."""
        gpu = torch.cuda.get_device_properties(device)
        about = (_FORMAT, library, torch.__version__, gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count)
        key = hashlib.sha256(repr(about).encode()).hexdigest()[:32]
        return cls(cache_folder() / f"products-{key}.json")

    def _read(self) -> dict[str, dict[str, str | None]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        known = found.items() if isinstance(found, dict) else ()
        return {product: algorithms for product, algorithms in known if isinstance(algorithms, dict)}

    def knows(self, product: str, rows: str) -> bool:
        return rows in self._known.get(product, {})

    def find(self, product: str, rows: str) -> str | None:
        return self._known.get(product, {}).get(rows)

    def add(self, product: str, rows: str, algorithm: str | None) -> None:
        self._known.setdefault(product, {})[rows] = algorithm

    def write(self) -> bool:
        """Write what is known, all or nothing; whether that could be done."""
        for product, algorithms in self._read().items():
            self._known[product] = self._known.get(product, {}) | algorithms
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                json.dump(self._known, file, indent=1)
            os.replace(file.name, self.path)
        except OSError:
            return False
        return True
