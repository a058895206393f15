"""The steps of a batch: its tensors, and on a GPU the CUDA graph that holds one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from halfbyte.decoder.families import Decoder
from halfbyte.decoder.sampling import Sampling
from halfbyte.decoder.step import State, logits_of
from halfbyte.step_ops import pick

_WARM: Final = 3
"""Steps ahead of a capture: the first chooses kernels, the second launches them in the ordinary way, and the third,
after the device is done, tells them that their weights are written; only then may launches start early."""
TOGETHER: Final = 8
"""Steps that one launch of a graph takes, where so many are left: between two launches a GPU is idle for a while."""

BEHIND: Final = 1
"""Launches that a GPU may be ahead of the host."""

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

    def __init__(
        self,
        decoder: Decoder,
        batch: int,
        length: int,
        sampling: Sampling,
        *,
        graph: bool,
    ) -> None:
        self.batch, self.length, self.sampling = batch, length, sampling
        self.state = State.empty(decoder, batch, length)
        self.generator = torch.Generator(decoder.device)
        self._decoder = decoder
        self._runs: dict[int, Callable[[], None]] = {1: self._step}
        self._arrivals: Any = None
        if decoder.device.type == "cuda":
            self._arrivals = _Arrivals(self.state.log, decoder.ranks)
        if graph:
            with torch.cuda.device(decoder.device):
                self._capture()
        else:
            self._step()  # what it compiles is no part of a text's time

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
        """Run so many steps; yields the B tokens of each, on a GPU while the device computes the next ones."""
        if self._arrivals is None:
            for _ in range(count):
                self._step()
                yield self.state.tokens.tolist()
            return
        arrivals, most, done = self._arrivals, max(self._runs), 0
        sent: list[tuple[int, int]] = []
        while done < count:
            size = most if count - done >= most else 1
            with torch.cuda.device(self._decoder.device):
                self._runs[size]()
            sent.append((done + 1, size))
            arrivals.send(*sent[-1])
            done += size
            if len(sent) > BEHIND:
                yield from arrivals.take(*sent.pop(0))
        for rows in sent:
            yield from arrivals.take(*rows)

    def first(self) -> list[int]:
        """The tokens chosen last, waiting for them."""
        tokens: list[int] = self.state.tokens.tolist()
        return tokens

    def _step(self) -> None:
        self._choose(logits_of(self._decoder, self.state))

    def _choose(self, logits: Tensor) -> None:
        state = self.state
        if self.sampling.greedy:
            pick(logits, state.tokens, state.counters, state.log)
            return
        self.sampling.choose(logits, self.generator, state.tokens)
        state.log.scatter_(0, state.counters[1:], state.tokens[None])
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
        pool = torch.cuda.graph_pool_handle()
        for size in (1, TOGETHER):
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                for _ in range(size):
                    self._step()
            self._runs[size] = graph.replay


class _Arrivals:
    """Rows of a log on a GPU copied to the host, beside what computes the next ones."""

    def __init__(self, log: Tensor, ranks: Any) -> None:
        self._log, self._stream, self._ranks = log, _cuda.Stream(log.device), ranks
        self._host = torch.empty(log.shape, dtype=log.dtype, pin_memory=True)
        self._events: dict[int, Any] = {}

    def send(self, row: int, count: int) -> None:
        """Copy rows when what is queued now is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._log.device))
        with torch.cuda.stream(self._stream):
            self._host[row : row + count].copy_(self._log[row : row + count], non_blocking=True)
            self._events[row] = self._stream.record_event()

    def take(self, row: int, count: int) -> list[list[int]]:
        """Rows that were sent, waiting for them."""
        event = self._events.pop(row)
        if self._ranks is None:
            event.synchronize()
        else:
            self._ranks.wait(event)
        tokens: list[list[int]] = self._host[row : row + count].tolist()
        return tokens
