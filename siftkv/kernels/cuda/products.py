"""Linear layers of more than a few rows on a GPU: cuBLASLt by the algorithm that was measured to be the fastest, where
that wins over PyTorch's choice.

Choices are made once for a kind of GPU, a version of the library, a product's sizes and a number of rows, by `prepare`,
before anything is captured or served, and kept in the user's cache folder: the same machine gives the same bits from
start to start. What was not chosen, or cannot be stored, is PyTorch's. `SIFTKV_PRODUCTS=library` in the environment
leaves all products to PyTorch.

A decode step's algorithm depends on its batch bucket alone. Prompts take only algorithms that add up every sum in one
piece and gave the bits that PyTorch gives, in a pass of the same length or in a short one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.errors import SiftKVError
from siftkv.kernels.cuda import cublas
from siftkv.kernels.cuda.choices import ChoiceFile
from siftkv.kernels.cuda.cublas import Algorithm, Product, product
from siftkv.kernels.cuda.linear import takes_rows
from siftkv.kernels.cuda.measure import fastest

Linear = tuple[Tensor, Tensor | None]
"""Weight `[N, E]` and bias `[N]` or None."""

PROMPT_ROWS = (8192, 4096, 2048, 1024)
"""Tokens of a prompt pass at which algorithms are measured; each serves passes from there to the next."""

_logger = logging.getLogger(__name__)
_OFF = ("SIFTKV_PRODUCTS", "library")
_MOST_SECONDS = 8.0
"""Of one `prepare`: what is not measured by then stays PyTorch's for good."""
_LEAST_BYTES = 4 << 20
"""Of a weight: smaller products take no time that matters."""
_ALIGNED = 256
"""Bytes at multiples of which the library expects its operands."""


@dataclass(frozen=True)
class _Kind:
    """What products have in common that differ in rows."""

    device: int
    dtype: torch.dtype
    outputs: int
    inputs: int
    has_bias: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> _Kind:
        return cls(weight.device.index, weight.dtype, weight.shape[0], weight.shape[1], bias is not None)

    @property
    def text(self) -> str:
        """What its choices are stored under."""
        return f"{self.dtype} {self.outputs}x{self.inputs}{' bias' * self.has_bias}"


@dataclass
class _Choices:
    """Algorithms of one kind by rows, None = PyTorch's. exact: of decode steps; from_rows: of prompts of so many on."""

    exact: dict[int, Algorithm | None] = field(default_factory=dict)
    from_rows: dict[int, Algorithm | None] = field(default_factory=dict)

    def find(self, rows: int) -> Algorithm | None:
        if rows in self.exact:
            return self.exact[rows]
        below = [r for r in self.from_rows if r <= rows]
        return self.from_rows[max(below)] if below else None


_choices: dict[_Kind, _Choices] = {}


@dataclass(frozen=True)
class _Job:
    """A choice to make. exact: for a decode step of so many rows, else for prompts from so many on."""

    kind: _Kind
    rows: int
    exact: bool

    @property
    def rows_text(self) -> str:
        """What it is stored under."""
        return f"{self.rows}" if self.exact else f"{self.rows}+"

    def adopt(self, algorithm: str | None) -> None:
        """Let products of this process use what was chosen."""
        choices = _choices.setdefault(self.kind, _Choices())
        try:
            chosen = None if algorithm is None else Algorithm.parse(algorithm)
        except (TypeError, ValueError):  # a damaged file
            chosen = None
        (choices.exact if self.exact else choices.from_rows)[self.rows] = chosen


_lent: ContextVar[Tensor | None] = ContextVar("lent", default=None)


@contextmanager
def lend(space: Tensor | None) -> Iterator[None]:
    """Let products inside pass parts of sums through `space`, of `cublas.WORKSPACE_BYTES`: its owner counts it, and may
    use it on one stream only. Elsewhere each product takes its own for as long as it runs.
    """
    token = _lent.set(space)
    try:
        yield
    finally:
        _lent.reset(token)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `siftkv.kernels.fused.linear`."""
    chosen = _choices.get(_Kind.of(weight, bias)) if _choices else None
    algorithm = chosen.find(len(x)) if chosen is not None else None
    if algorithm is None or not _takes(x, weight, bias):
        return F.linear(x, weight, bias)
    found, bytes_needed = _plan(weight.device.index, x.dtype, len(x), *weight.shape, bias is not None, algorithm.text)
    if bytes_needed is None:
        return F.linear(x, weight, bias)
    space = _lent.get() if bytes_needed else None
    if bytes_needed and space is None:
        space = torch.empty(bytes_needed, dtype=torch.uint8, device=x.device)
    out = x.new_empty(len(x), weight.shape[0])
    found.launch(x, weight, bias, out, algorithm, space)
    return out


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    shapes = x.dim() == 2 and x.dtype == weight.dtype and x.is_contiguous() and weight.is_contiguous()
    addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
    return shapes and addresses % _ALIGNED == 0 and (bias is None or bias.is_contiguous())


@lru_cache(maxsize=2048)
def _plan(
    device: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int, has_bias: bool, algorithm: str
) -> tuple[Product, int | None]:
    """The product, and the bytes of work space that the algorithm takes for it, None where it does not compute it."""
    found = product(device, dtype, rows, outputs, inputs, has_bias)
    return found, found.workspace(Algorithm.parse(algorithm))


def space_for_graphs(device: torch.device) -> Tensor | None:
    """Work space to `lend`, where any product of this process may need some."""
    chosen = any(kind.device == device.index for kind in _choices)
    return torch.empty(cublas.WORKSPACE_BYTES, dtype=torch.uint8, device=device) if chosen else None


def prepare(layers: Iterable[Sequence[Linear]], head: Linear, rows: Sequence[int], stream: torch.cuda.Stream) -> float:
    """Choose algorithms for a model's products. Returns the seconds that measuring took, at most a few; 0 where all was
    known.

    layers: for each kind of product, the weights and biases of all layers. head: that of the logits. rows: of decode
    steps; prompts are seen to besides. stream: where graphs are captured, which is where time is taken.
    """
    kinds = {_Kind.of(*linears[0]): linears for linears in (*layers, [head])}
    kinds = {kind: linears for kind, linears in kinds.items() if linears[0][0].nbytes >= _LEAST_BYTES}
    if os.environ.get(_OFF[0]) == _OFF[1] or not kinds:
        return 0.0
    try:
        stored = ChoiceFile.of(next(iter(kinds)).device, cublas.version())
    except SiftKVError as error:
        _logger.info("PyTorch computes all products: %s", error)
        return 0.0
    begin = time.perf_counter()
    jobs = [_Job(kind, count, exact) for count, exact in _order(rows) for kind in kinds]
    jobs = [job for job in jobs if _is_needed(job, kinds[job.kind][0][0], job.kind == _Kind.of(*head))]
    missing = [job for job in jobs if not stored.knows(job.kind.text, job.rows_text)]
    for job in missing:
        in_time = time.perf_counter() - begin < _MOST_SECONDS
        found = fastest(kinds[job.kind], job.rows, job.exact, stream) if in_time else None
        stored.add(job.kind.text, job.rows_text, None if found is None else found.text)
    if missing and not stored.write():
        _logger.info("PyTorch computes all products: choices cannot be stored in %s", stored.path.parent)
        return time.perf_counter() - begin
    for job in jobs:
        job.adopt(stored.find(job.kind.text, job.rows_text))
    seconds = time.perf_counter() - begin if missing else 0.0
    _logger.info("algorithms of %d products measured in %.1f s", len(missing), seconds)
    return seconds


def _is_needed(job: _Job, weight: Tensor, is_head: bool) -> bool:
    """Prompts ask for the logits of few tokens, and steps of few rows have kernels of their own."""
    return not takes_rows(job.rows, weight) if job.exact else not is_head


def _order(rows: Sequence[int]) -> list[tuple[int, bool]]:
    """Rows, and whether they are those of a decode step; what matters most first."""
    down = sorted(rows, reverse=True)
    halves = [count for i, count in enumerate(down) if not i or count & (count - 1) == 0]
    steps = [(count, True) for count in dict.fromkeys((*halves, *down))]
    prompts = [(count, False) for count in PROMPT_ROWS]
    return [*steps[:1], *prompts, *steps[1:]]
