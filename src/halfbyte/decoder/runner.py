"""The steps of a batch: its tensors, and on a GPU the CUDA graph that holds one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from halfbyte.decoder.families import Decoder
from halfbyte.decoder.sampling import Sampling
from halfbyte.decoder.step import State, logits_of

_WARM: Final = 3
"""Steps ahead of a capture: the first chooses kernels, the second launches them in the ordinary way, and the third,
after the device is done, tells them that their weights are written; only then may launches start early."""
BEHIND: Final = 2
"""Steps that a GPU may be ahead of the host."""

_cuda: Final[Any] = torch.cuda


class Runner:
    """Steps of B sequences of at most T tokens.

    Args:
        decoder: the model taken apart.
        batch: B.
        length: T.
        sampling: how tokens are chosen.
        graph: whether a CUDA graph holds the step.

    Attributes:
        state: its tensors.
        generator: of random numbers, for sampling.
    """

    def __init__(self, decoder: Decoder, batch: int, length: int, sampling: Sampling, *, graph: bool) -> None:
        self.batch, self.length, self.sampling = batch, length, sampling
        self.state = State.empty(decoder, batch, length)
        self.generator = torch.Generator(decoder.device)
        self._decoder = decoder
        self._graph: Any = None
        self._arrivals: Any = None
        if decoder.device.type == "cuda":
            self._arrivals = _Arrivals(self.state.log)
        if graph:
            with torch.cuda.device(decoder.device):
                self._capture()

    def begin(self, seed: int) -> None:
        """Make ready for the tokens of a new batch: the next row of the log is the first."""
        self.generator.manual_seed(seed)
        self.state.counters.zero_()

    def fill(self, rows: list[int], cache: Any) -> None:
        """Take over the keys and values of equally long prompts.

        Args:
            rows: their places in the batch.
            cache: of transformers, with (len(rows), Hkv, L, D) in each layer.
        """
        at = slice(rows[0], rows[-1] + 1) if rows == [*range(rows[0], rows[-1] + 1)] else rows
        for i, layer in enumerate(cache.layers[: len(self._decoder.layers)]):
            length = layer.keys.shape[-2]
            self.state.keys[i, at, :, :length] = layer.keys
            self.state.values[i, at, :, :length] = layer.values

    def choose(self, logits: Tensor, positions: Tensor) -> None:
        """Choose the first tokens, from the logits of the prompts."""
        self.state.positions.copy_(positions - 1)
        self._choose(logits)

    def steps(self, count: int) -> Iterator[list[int]]:
        """Run so many steps; yields the B tokens of each, on a GPU while the device is ahead."""
        if self._arrivals is None:
            for _ in range(count):
                self._step()
                yield self.state.tokens.tolist()
            return
        arrivals, run = self._arrivals, self._graph.replay if self._graph is not None else self._step
        for i in range(count):
            run()
            arrivals.send(i + 1)
            if i >= BEHIND:
                yield arrivals.take(i + 1 - BEHIND)
        for i in range(max(0, count - BEHIND), count):
            yield arrivals.take(i + 1)

    def first(self) -> list[int]:
        """The tokens chosen last, waiting for them."""
        tokens: list[int] = self.state.tokens.tolist()
        return tokens

    def _step(self) -> None:
        self._choose(logits_of(self._decoder, self.state))

    def _choose(self, logits: Tensor) -> None:
        state = self.state
        self.sampling.choose(logits, self.generator, state.tokens)
        state.log.index_copy_(0, state.count, state.tokens[None])
        state.counters.add_(1)

    def _capture(self) -> None:
        side: Any = _cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self.state.counters.zero_()
                self._step()
                torch.cuda.synchronize()
            self.state.counters.zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._step()
        self._graph = graph


class _Arrivals:
    """Rows of a log on a GPU copied to the host, beside what computes the next ones."""

    def __init__(self, log: Tensor) -> None:
        self._log, self._stream = log, _cuda.Stream(log.device)
        self._host = torch.empty(log.shape, dtype=log.dtype, pin_memory=True)
        self._events = [_cuda.Event() for _ in range(BEHIND + 1)]

    def send(self, row: int) -> None:
        """Copy a row when what is queued now is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._log.device))
        with torch.cuda.stream(self._stream):
            self._host[row].copy_(self._log[row], non_blocking=True)
            self._events[row % len(self._events)].record()

    def take(self, row: int) -> list[int]:
        """A row that was sent, waiting for it."""
        self._events[row % len(self._events)].synchronize()
        tokens: list[int] = self._host[row].tolist()
        return tokens
