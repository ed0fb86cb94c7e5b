"""What an evaluation has measured so far, one JSON object a line, so that an interrupted run continues where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siftkv.errors import SiftKVError
from siftkv.models import LoadedModel
from siftkv.models.fingerprint import model_fingerprint
from siftkv.policies import parse_policy


def fingerprint(model: LoadedModel) -> str:
    """16 hex digits that tell models apart: shape, dtype, device type and a sample of the weights that conditioning
    leaves alone.
    """
    decoder = model.decoder
    about = model.config, decoder.dtype, decoder.device.type, model_fingerprint(decoder)
    return hashlib.sha256("|".join(map(str, about)).encode()).hexdigest()[:16]


class Records:
    """The records file of an evaluation. A record belongs to a run when model, settings, policy and item are the same.

    identity: everything that a result depends on besides policy and item, as JSON types. Lines of other runs are kept
    and ignored, as is a last line that an interruption cut. Raises SiftKVError for a file that cannot be read or
    written.

    Example:
        >>> records = Records("out/records.jsonl", {"model": fingerprint(model), "prompt": 1536})
        >>> if records.get("diffkv", "story-0") is None:
        ...     records.add("diffkv", "story-0", {"mean_kl": 0.01})
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._identity = json.dumps(identity, sort_keys=True)
        self._known: dict[str, dict[str, Any]] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self.path.read_text("utf-8") if self.path.exists() else ""
            if content and not content.endswith("\n"):
                content = content[: content.rfind("\n") + 1]
                self.path.write_text(content, "utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SiftKVError(f"cannot use {self.path} for records: {getattr(error, 'strerror', error)}") from error
        for number, line in enumerate(content.splitlines(), 1):
            self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        try:
            record = json.loads(line)
            self._known[record["key"]] = record
        except (ValueError, KeyError, TypeError) as error:
            raise SiftKVError(
                f"line {number} of {self.path} is no record: remove it or choose another --out"
            ) from error

    def _key(self, kv: str, item: str) -> str:
        whole = f"{self._identity}|{parse_policy(kv)!r}|{item}"
        return hashlib.sha256(whole.encode()).hexdigest()[:24]

    def get(self, kv: str, item: str) -> dict[str, Any] | None:
        """The record of one policy and item; None when it is still to be measured."""
        return self._known.get(self._key(kv, item))

    def add(self, kv: str, item: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record at once, and return it."""
        record = {"key": self._key(kv, item), "kv": kv, "item": item, **fields}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise SiftKVError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._known[record["key"]] = record
        return record
