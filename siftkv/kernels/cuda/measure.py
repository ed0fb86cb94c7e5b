"""Which algorithm of cuBLASLt computes a product fastest, measured as it will run: in a CUDA graph, over the weights of
so many layers that none is left in the cache of the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.errors import SiftKVError
from siftkv.kernels.cuda.cublas import WORKSPACE_BYTES, Algorithm, Product, product

_logger = logging.getLogger(__name__)
_GAIN = 0.99
"""Of PyTorch's time: an algorithm that takes more is not worth other bits."""
_STREAMED_BYTES = 256 << 20
_MOST_CALLS = 8
_FINALISTS, _ROUNDS = 3, 5
_TILES = (64, 128, 256)
"""Rows of blocks: what is proposed for whole blocks may serve the rows at hand too."""
_ERROR = 2**-6
"""Of the largest result: another order of summation moves less."""
_SHORT_PASS = 1024
"""Rows of a prompt pass in which tokens get bits that they may get in a longer one too."""


def fastest(
    layers: Sequence[tuple[Tensor, Tensor | None]], rows: int, exact: bool, stream: torch.cuda.Stream
) -> Algorithm | None:
    """The algorithm for `rows` rows, None where PyTorch's own choice is as good, or memory for measuring is short.

    layers: weights `[N, E]` and biases `[N]` or None, all alike. exact: for a decode step; else for a prompt, and then
    only algorithms that give PyTorch's bits. stream: to capture on.
    """
    weight = layers[0][0]
    scratch = rows * sum(weight.shape) * weight.element_size()
    if 4 * scratch + 2 * WORKSPACE_BYTES > torch.cuda.mem_get_info(weight.device)[0]:
        return None
    stream.wait_stream(torch.cuda.current_stream(weight.device))
    with torch.inference_mode(), torch.cuda.stream(stream):
        found = _Contest(layers, rows, exact, stream).winner()
    torch.cuda.current_stream(weight.device).wait_stream(stream)
    return found


@dataclass(frozen=True, order=True)
class _Trial:
    """An algorithm's time in milliseconds, and the graph that takes it."""

    time: float
    algorithm: Algorithm = field(compare=False)
    graph: torch.cuda.CUDAGraph = field(compare=False)


class _Contest:
    """Algorithms against PyTorch's choice, on one product."""

    def __init__(
        self, layers: Sequence[tuple[Tensor, Tensor | None]], rows: int, exact: bool, stream: torch.cuda.Stream
    ) -> None:
        weight = layers[0][0]
        calls = min(_MOST_CALLS, max(2, -(-_STREAMED_BYTES // weight.nbytes))) if exact else 2
        self._layers = [layers[i % len(layers)] for i in range(calls)]
        self._stream, self._rows, self._exact = stream, rows, exact
        generator = torch.Generator(weight.device).manual_seed(0)
        shape = (rows, weight.shape[1])
        self._x = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
        self._out = torch.empty(rows, weight.shape[0], device=weight.device, dtype=weight.dtype)
        self._space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=weight.device)
        self._product = self._of_rows(rows)

    def _of_rows(self, rows: int) -> Product:
        weight, bias = self._layers[0]
        return product(weight.device.index, weight.dtype, rows, *weight.shape, bias is not None)

    def winner(self) -> Algorithm | None:
        """The fastest algorithm that gains something."""
        self._library()
        expected = self._out.clone()
        ranked = self._ranked(self._entrants())
        best = list(islice((trial for trial in ranked if self._agrees(trial.algorithm, expected)), _FINALISTS))
        graphs = [self._graph(self._library), *(trial.graph for trial in best)]
        rounds = [[self._time(graph) for graph in graphs] for _ in range(_ROUNDS)]
        usual, *others = map(median, zip(*rounds, strict=True))
        _logger.debug("%s, %d rows: %.1f us, others %s", *self._about(usual, others))
        first = min(range(len(best)), key=others.__getitem__, default=None)
        return best[first].algorithm if first is not None and others[first] <= _GAIN * usual else None

    def _ranked(self, algorithms: Iterable[Algorithm]) -> list[_Trial]:
        """Those that run, the fastest first."""
        graphs = [(a, graph) for a in algorithms if (graph := self._trial(a)) is not None]
        return sorted(_Trial(self._time(graph), algorithm, graph) for algorithm, graph in graphs)

    def _about(self, usual: float, others: Sequence[float]) -> tuple[object, ...]:
        each = [f"{ms / len(self._layers) * 1e3:.1f}" for ms in others]
        return tuple(self._layers[0][0].shape), self._rows, usual / len(self._layers) * 1e3, each

    def _entrants(self) -> list[Algorithm]:
        """What the library proposes for these rows, and for whole blocks of about as many."""
        counts = {self._rows, *(-(-self._rows // tile) * tile for tile in _TILES)} if self._exact else {self._rows}
        found = {a.text: a for count in sorted(counts) for a in self._of_rows(count).proposals()}
        usable = [a for a in found.values() if self._product.workspace(a) is not None]
        return [a for a in usable if self._exact or a.splits == 1]

    def _trial(self, algorithm: Algorithm) -> torch.cuda.CUDAGraph | None:
        try:
            return self._graph(lambda: self._run(algorithm))
        except SiftKVError:  # not every proposal runs
            return None

    def _agrees(self, algorithm: Algorithm, expected: Tensor) -> bool:
        """Whether it gives PyTorch's results: but for the order of summation or, for prompts, to the bit, those of this
        pass or of a short one.
        """
        self._run(algorithm)
        if self._exact:
            error = (self._out.float() - expected.float()).abs().max()
            return bool(error <= _ERROR * expected.float().abs().max())
        short = F.linear(self._x[:_SHORT_PASS], *self._layers[0])
        same = [torch.equal(self._out, expected), torch.equal(self._out[:_SHORT_PASS], short)]
        _logger.debug("bits of this pass and of a short one: %s", same)
        return any(same)

    def _run(self, algorithm: Algorithm) -> None:
        for weight, bias in reversed(self._layers):  # the first layer last: its result is looked at
            self._product.launch(self._x, weight, bias, self._out, algorithm, self._space)

    def _library(self) -> None:
        for weight, bias in reversed(self._layers):
            if bias is None:
                torch.mm(self._x, weight.t(), out=self._out)
            else:
                torch.addmm(bias, self._x, weight.t(), out=self._out)

    def _graph(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        graph.replay()
        return graph

    def _time(self, graph: torch.cuda.CUDAGraph) -> float:
        """Milliseconds of a replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self._stream)
        graph.replay()
        end.record(self._stream)
        end.synchronize()
        return float(begin.elapsed_time(end))
