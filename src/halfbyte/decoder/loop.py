"""``generate``: prompts in, tokens out, with a static cache and on a GPU a CUDA graph."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from halfbyte.decoder import whole
from halfbyte.decoder.families import Decoder, ranks_of, why_not
from halfbyte.decoder.runner import Runner
from halfbyte.decoder.sampling import Sampling
from halfbyte.errors import UsageError

Stream = Callable[[int, int], None]
"""Called with the number of a prompt and its next token."""

_ROUND: Final = 64
"""Positions of a cache are a multiple of this."""
_KEPT: Final = 2
"""Caches and CUDA graphs that are kept with a model, the last used ones."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What ``generate`` gives.

    Attributes:
        tokens: for each prompt the new tokens, with the one that stopped it.
        prefill_seconds: from the prompts to the first new tokens.
        decode_seconds: for all other tokens.
        setup_seconds: for the cache and the CUDA graph; 0 where a kept one was used.
        steps: of decoding, each of one token for every prompt.
        bytes_per_step: what a step must read, at the middle of the text; None where the model is not taken apart.
        memory: bytes of the cache and all else that steps hold.
        how: what ran, in words.
    """

    tokens: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    setup_seconds: float
    steps: int
    bytes_per_step: int | None
    memory: int
    how: str

    @property
    def tokens_per_second(self) -> float:
        """New tokens but for the first of each prompt, by the seconds of decoding; 0.0 where there are none."""
        later = sum(len(tokens) - 1 for tokens in self.tokens)
        return later / self.decode_seconds if later and self.decode_seconds else 0.0


def generate(
    model: Module,
    prompts: Sequence[Sequence[int]] | Tensor,
    *,
    max_new_tokens: int,
    stop: Iterable[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    graph: bool | None = None,
    stream: Stream | None = None,
) -> Generated:
    """Continue prompts, all of them together, one token of each at a time.

    Every rank of a model that is split calls it, with the same arguments, and gets the same text.

    The prompts go through the model's own forward, those of equal lengths together. Then each step is a few operations
    for each layer (``Decoder``), in a CUDA graph where the model lies on a GPU, and the host follows some steps behind.
    Models that cannot be taken apart run their own forward with a static cache, and ``how`` says why. Caches and graphs
    of the last two calls are kept with the model.

    Args:
        model: of transformers, for causal language modelling; dense or with NVFP4 layers.
        prompts: numbers of tokens, at least one in each prompt; or a tensor (B, L).
        max_new_tokens: for each prompt.
        stop: tokens that end a prompt's text.
        temperature: 0 takes the most probable token; otherwise logits are divided by it and a token is drawn.
        top_k: draw among so many of the most probable tokens.
        top_p: draw among the most probable tokens, as few as together have this probability.
        seed: of what is drawn: equal seeds give equal texts, with and without a graph; by default from torch's
            generator for the CPU. Of ranks that of the first counts.
        graph: True refuses to run without a CUDA graph, False runs without; None uses one where it can.
        stream: called with the number of a prompt and its next token, as tokens come.

    Returns:
        The tokens, the times, and what ran.

    Raises:
        UsageError: prompts or numbers that cannot be meant, more positions than the model has, or a graph that
            cannot be; on every rank, where the ranks were asked for different texts.
        RankError: another rank failed, or did not answer in time.
    """
    sampling = Sampling(temperature, top_k, top_p)
    rows = _checked(prompts)
    max_new_tokens = _whole_number("max_new_tokens", max_new_tokens)
    if max_new_tokens < 1:
        raise UsageError("max_new_tokens is a number from 1 on", got=max_new_tokens)
    ends = frozenset(_numbers("stop", stop))
    seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else _whole_number("seed", seed) % 2**64
    _refuse_other_models(model)
    ranks = ranks_of(model)
    if ranks is not None:
        asked = rows, max_new_tokens, sampling, sorted(ends), graph
        seed = ranks.agreed("what is to be generated", asked, seed - 2**63) + 2**63
    reason = why_not(model)
    if reason is not None and graph:
        raise UsageError("no CUDA graph holds this model's step", got=reason)
    text = _Text(len(rows), ends, stream)
    with torch.no_grad():
        if reason is not None:
            times = whole.run(model, rows, max_new_tokens, sampling, seed, text.take)
            return Generated(
                tokens=text.tokens,
                prefill_seconds=times.prefill,
                decode_seconds=times.decode,
                setup_seconds=0.0,
                steps=times.steps,
                bytes_per_step=None,
                memory=times.memory,
                how=f"{type(model).__name__}: transformers' own forward with a static cache, because {reason}",
            )
        return _generate(Decoder.of(model), model, rows, max_new_tokens, sampling, seed, text, graph)


def _generate(
    decoder: Decoder,
    model: Module,
    rows: list[list[int]],
    new: int,
    sampling: Sampling,
    seed: int,
    text: _Text,
    graph: bool | None,
) -> Generated:
    longest = max(map(len, rows))
    _check_range(rows, longest + new - 1, decoder)
    begin = time.perf_counter()
    key, runner, how = _runner(decoder, len(rows), longest + new - 1, sampling, graph)
    try:
        return _run(decoder, model, runner, rows, new, seed, text, begin, how)
    finally:
        _keep(decoder, key, runner, how)


def _run(
    decoder: Decoder,
    model: Module,
    runner: Runner,
    rows: list[list[int]],
    new: int,
    seed: int,
    text: _Text,
    begin: float,
    how: str,
) -> Generated:
    ready = time.perf_counter()
    runner.begin(seed)
    runner.choose(_prefill(decoder, model, runner, rows), torch.tensor([len(row) for row in rows]))
    more = text.take(runner.first())
    filled = time.perf_counter()
    steps = 0
    if more and new > 1:
        for tokens in runner.steps(new - 1):
            steps += 1
            if not text.take(tokens):
                break
    end = time.perf_counter()
    if decoder.ranks is not None:
        decoder.ranks.check()
    context = sum(len(row) for row in rows) // len(rows) + (steps + 1) // 2
    return Generated(
        tokens=text.tokens,
        prefill_seconds=filled - ready,
        decode_seconds=end - filled,
        setup_seconds=ready - begin,
        steps=steps,
        bytes_per_step=decoder.bytes_per_step(len(rows), context),
        memory=runner.state.nbytes,
        how=how,
    )


def _runner(decoder: Decoder, batch: int, length: int, sampling: Sampling, graph: bool | None) -> tuple[Any, ...]:
    """A kept runner, or a new one, with its key and what it does in words; nobody else finds it until it is kept."""
    cuda = decoder.device.type == "cuda"
    if graph and not cuda:
        raise UsageError("a CUDA graph needs a model on a GPU", got=str(decoder.device))
    length = -(-length // _ROUND) * _ROUND
    wanted = cuda if graph is None else graph
    for key in list(decoder.runners):
        if key[:3] == (batch, sampling, wanted) and length <= key[3] <= 2 * length:
            kept = decoder.runners.pop(key, None)
            if kept is not None:
                return key, *kept
    _drop(decoder, _KEPT - 1)
    with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be written to by later calls
        made = Runner(decoder, batch, length, sampling, graph=wanted)
    where = "in a CUDA graph" if wanted else "without a graph" if cuda else "on the CPU"
    how = (
        f"{decoder.family}: fused steps {where}, batch {batch}, "
        f"a cache of {length} positions ({made.state.nbytes / 1e6:.1f} MB)"
    )
    return (batch, sampling, wanted, length), made, how


def _keep(decoder: Decoder, key: Any, runner: Runner, how: str) -> None:
    """Keep a runner as the last used one."""
    decoder.runners.pop(key, None)
    _drop(decoder, _KEPT - 1)
    decoder.runners[key] = runner, how


def _drop(decoder: Decoder, left: int) -> None:
    """Let go of the runners that were used first, until so many are left."""
    for key in list(decoder.runners)[: max(len(decoder.runners) - left, 0)]:
        decoder.runners.pop(key, None)


def _prefill(decoder: Decoder, model: Module, runner: Runner, rows: list[list[int]]) -> Tensor:
    """Fill the runner's cache; the logits (B, V) of the last positions."""
    from transformers import DynamicCache

    name = whole.cache_name(model)
    logits: list[Tensor] = [torch.empty(0)] * len(rows)
    for length in dict.fromkeys(map(len, rows)):
        group = [i for i, row in enumerate(rows) if len(row) == length]
        ids = torch.tensor([rows[i] for i in group], device=decoder.device)
        cache = DynamicCache()
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})
        runner.fill(group, cache)
        for i, last in zip(group, out.logits[:, -1], strict=True):
            logits[i] = last
    return torch.stack(logits)


@dataclass
class _Text:
    """The tokens of all prompts as they come."""

    count: int
    stop: frozenset[int]
    stream: Stream | None
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.count)]
        self._open = set(range(self.count))

    def take(self, tokens: Sequence[int], of: Sequence[int] | None = None) -> bool:
        """Add the next token of these prompts, where they have not stopped; whether some of them go on."""
        of = range(self.count) if of is None else of
        for i, token in zip(of, tokens, strict=True):
            if i not in self._open:
                continue
            self.tokens[i].append(token)
            if self.stream is not None:
                self.stream(i, token)
            if token in self.stop:
                self._open.discard(i)
        return not self._open.isdisjoint(of)


def _checked(prompts: Any) -> list[list[int]]:
    given = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise UsageError("prompts are sequences of tokens, one for each text", got=repr(given)[:80])
    rows = [_numbers("a prompt", prompt) for prompt in given]
    if not rows or not all(rows):
        raise UsageError("prompts are sequences of at least one token", got=f"lengths {[len(row) for row in rows]}")
    return rows


def _numbers(what: str, given: Any) -> list[int]:
    """Some whole numbers, of any type that stands for one exactly; UsageError for what is no sequence of them."""
    if not isinstance(given, Iterable) or isinstance(given, str) or getattr(given, "ndim", 1) != 1:
        raise UsageError(f"{what} is a sequence of tokens", got=repr(given)[:80])
    return [_whole_number(f"a token of {what}", one) for one in given]


def _whole_number(what: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise UsageError(f"{what} is not a whole number", got=repr(given)[:80]) from None


def _refuse_other_models(model: Any) -> None:
    """UsageError for what does not continue a text."""
    able = getattr(model, "can_generate", None)
    if able is None or not able() or model.config.is_encoder_decoder:
        expected = "a model of transformers for causal language modelling"
        raise UsageError("this model does not continue texts", got=type(model).__name__, expected=expected)


def _check_range(rows: list[list[int]], length: int, decoder: Decoder) -> None:
    for i, row in enumerate(rows):
        if min(row) < 0 or max(row) >= decoder.vocabulary:
            wrong = next(token for token in row if not 0 <= token < decoder.vocabulary)
            raise UsageError(
                "no token has this number",
                index=[i, row.index(wrong)],
                got=wrong,
                expected=f"0..{decoder.vocabulary - 1}",
            )
    if length > decoder.longest:
        raise UsageError(
            "prompt and new tokens need more positions than the model has",
            got=length,
            expected=f"at most {decoder.longest}",
            hint="ask for fewer new tokens",
        )
