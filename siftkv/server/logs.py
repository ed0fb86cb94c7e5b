"""Logs: one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

FIELDS = "fields"
"""Name of the `extra` whose entries become fields of a line."""


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "message": ...}`, the fields that a record carries, and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str = "info") -> None:
    """Send the logs of the server and of uvicorn to stderr as JSON lines. uvicorn's access log stays off: the server
    writes a line a request itself.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("siftkv.server", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.error").handlers = []
    logging.getLogger("uvicorn.error").propagate = True
