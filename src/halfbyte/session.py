"""A checkpoint that answers: loaded with its tokenizer, prompts in, text out as it comes, and how fast that was."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from halfbyte.checkpoint.reader import open_checkpoint
from halfbyte.errors import FormatError, MissingExtraError, UnavailableError, UsageError

PRECISIONS: Final = ("exact", "int8", "fp8", "w4a4")
DTYPES: Final = ("float32", "bfloat16", "float16")


class Words:
    """The text of tokens as they come: what is given out is never taken back, and no character is cut in two.

    Args:
        decode: the text of some tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.tokens: list[int] = []
        self._start = self._end = 0

    def add(self, token: int) -> str:
        """The text that a token ends; empty where a character is not whole yet."""
        self.tokens.append(token)
        before, now = self._texts()
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._start, self._end = self._end, len(self.tokens)
        return now[len(before) :]

    def rest(self) -> str:
        """What is left when no more tokens come."""
        before, now = self._texts()
        self._start = self._end = len(self.tokens)
        return now[len(before) :]

    def _texts(self) -> tuple[str, str]:
        """Of the tokens since the last text but one: what of them was given out, and all. A token's text depends on
        the one before."""
        return self.decode(self.tokens[self._start : self._end]), self.decode(self.tokens[self._start :])


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model said, and how fast.

    Attributes:
        text: without special tokens.
        prompt: how many tokens it was asked with.
        generated: as ``halfbyte.generate`` gives it.
        read: bytes a second that the device reads at best.
        measured: whether that was measured now; else it is known of the device.
    """

    text: str
    prompt: int
    generated: Any
    read: float
    measured: bool

    @property
    def read_rate(self) -> float | None:
        """Bytes a second that steps read; None where it is not known what they read, or there are none."""
        made = self.generated
        if made.bytes_per_step is None or not made.steps or not made.decode_seconds:
            return None
        return float(made.bytes_per_step * made.steps / made.decode_seconds)

    @property
    def share(self) -> float | None:
        """That over what the device reads at best: 1 is the roofline of steps that wait for nothing but weights."""
        return None if self.read_rate is None else self.read_rate / self.read


@dataclass(kw_only=True)
class Session:
    """A model and its tokenizer.

    Attributes:
        model: of transformers.
        tokenizer: of transformers; None where none was asked for.
        path: of the checkpoint.
        quantized: whether any of its layers is.
    """

    model: Any
    tokenizer: Any
    path: Path
    quantized: bool
    _read: list[tuple[float, bool]] = field(default_factory=list)

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        precision: str = "exact",
        fuse: bool = True,
        layout: str | None = None,
        tokenizer: bool = True,
    ) -> Session:
        """Load a checkpoint, quantized or dense.

        Args:
            path: a directory, or a name on the hub.
            device: of torch's; by default a GPU if torch sees one, else the CPU.
            dtype: of what is dense, and of activations; by default the config's.
            precision: of products with NVFP4 weights: "exact", "int8", "fp8" or "w4a4".
            fuse: q, k and v run as one product, and gate and up.
            layout: of NVFP4 weights; by default the one for the device.
            tokenizer: whether one is needed.

        Raises:
            MissingExtraError: no torch, or no transformers.
            UnavailableError: a device that is not here.
            UsageError: an option that is not known, or a checkpoint that the model of its config cannot take.
            FormatError: a checkpoint that cannot be read or is not sound, or one without a tokenizer.
        """
        require("a model")
        place = device_of(device)
        _check(precision, PRECISIONS, "precision")
        _check(dtype or DTYPES[0], DTYPES, "dtype")
        checkpoint = open_checkpoint(path)
        checkpoint.require_readable()
        folder = checkpoint.path
        if not folder.is_dir() or not checkpoint.config:
            raise FormatError("a model is loaded from a directory with a config.json", file=str(folder))
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        words = _tokenizer(folder) if tokenizer else None
        quantized = any(module.kind in ("nvfp4", "fp8") for module in checkpoint.modules)
        how = None if precision == "exact" else precision
        model = _model(folder, quantized, place, dtype, how, fuse, layout)
        if not getattr(model, "can_generate", bool)():
            raise UsageError("this model does not generate text", file=str(folder), got=type(model).__name__)
        return Session(
            model=model,
            tokenizer=words,
            path=folder,
            quantized=quantized,
        )

    @property
    def device(self) -> str:
        """Where the model is."""
        return str(next(self.model.parameters()).device)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def parted(self) -> bool:
        """Whether the model can be taken apart, so that steps are fused."""
        from halfbyte.decoder.families import why_not

        return why_not(self.model) is None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        held = {(t.device, t.data_ptr()): t.nbytes for t in (*self.model.parameters(), *self.model.buffers())}
        return sum(held.values())

    @property
    def read(self) -> tuple[float, bool]:
        """Bytes a second that the device reads at best, and whether they were measured now."""
        if not self._read:
            from halfbyte.plans import ceiling
            from halfbyte.timing import read_rate

            _, known = ceiling(self.device)
            self._read.append((read_rate(self.device), True) if known is None else (known.read, False))
        return self._read[0]

    def tokens(self, prompt: str, *, system: str | None = None, chat: bool = True) -> list[int]:
        """The tokens of a prompt, in the tokenizer's chat template if it has one and ``chat``.

        Raises:
            UsageError: an empty prompt, one that is not Unicode, a system prompt without a template, or a template
                that fails.
            MissingExtraError: a template, and no jinja2.
        """
        if not prompt.strip():
            raise UsageError("the prompt is empty")
        for text in (prompt, system or ""):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UsageError("the prompt is not UTF-8", got=f"{text[error.start : error.end]!a}") from None
        if not (chat and self.tokenizer.chat_template):
            if system is not None:
                raise UsageError("a system prompt needs a chat template", got="none" if chat else "--no-chat")
            return self._numbers(prompt, True)
        talk = [{"role": "system", "content": system}] if system is not None else []
        talk.append({"role": "user", "content": prompt})
        try:
            text = self.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        except ImportError:
            raise MissingExtraError("jinja2", "hf", "a chat template") from None
        except Exception as error:  # what the checkpoint's template raises, whatever it is
            raise UsageError("the chat template fails", got=_line(error), hint="--no-chat does without") from error
        return self._numbers(text, False)

    def _numbers(self, text: str, special: bool) -> list[int]:
        found = [int(token) for token in self.tokenizer(text, add_special_tokens=special)["input_ids"]]
        if not found:
            raise UsageError("the prompt has no tokens", got=repr(text[:40]))
        return found

    @property
    def stops(self) -> set[int]:
        """The tokens that end a text."""
        config = getattr(self.model, "generation_config", None)
        given = getattr(config, "eos_token_id", None)
        listed = given if isinstance(given, list | tuple) else [given]
        own = [self.tokenizer.eos_token_id] if self.tokenizer is not None else []
        return {int(token) for token in (*listed, *own) if token is not None}

    def answer(self, prompt: list[int], *, max_new_tokens: int, emit: Callable[[str], None], **how: Any) -> Answer:
        """Go on after a prompt.

        Args:
            prompt: tokens.
            max_new_tokens: at most.
            emit: called with each piece of text.
            how: as ``halfbyte.generate`` takes it: temperature, top_p, top_k, seed, graph.

        Raises:
            UsageError: as ``halfbyte.generate``.
        """
        from halfbyte.decoder import generate

        words = Words(lambda tokens: self.tokenizer.decode(tokens, skip_special_tokens=True))
        pieces: list[str] = []

        def give(text: str) -> None:
            if text:
                pieces.append(text)
                emit(text)

        made = generate(
            self.model,
            [prompt],
            max_new_tokens=max_new_tokens,
            stop=self.stops,
            stream=lambda _, token: give(words.add(token)),
            **how,
        )
        give(words.rest())
        read, measured = self.read
        return Answer(text="".join(pieces), prompt=len(prompt), generated=made, read=read, measured=measured)


def device_of(device: str | None) -> str:
    """A device of torch's that is here.

    Raises:
        UsageError: no such name.
        UnavailableError: it is not here.
    """
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        asked = torch.device(device)
    except RuntimeError:
        asked = None
    if asked is None or asked.type not in ("cpu", "cuda"):
        raise UsageError("unknown device", got=repr(device), expected="cpu, cuda, or one such as cuda:0")
    if asked.type == "cuda" and (not torch.cuda.is_available() or (asked.index or 0) >= torch.cuda.device_count()):
        raise UnavailableError("torch sees no such GPU here", got=device, hint="halfbyte doctor tells what there is")
    return str(asked)


def require(what: str) -> None:
    """MissingExtraError where a package is missing that runs models; ``what`` needs it."""
    for name in ("torch", "transformers"):
        try:
            __import__(name)
        except ImportError:
            raise MissingExtraError(name, "hf", what) from None


def _check(value: str, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise UsageError(f"unknown {what}", got=repr(value), expected=" or ".join(known))


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of many kinds, by what is missing or damaged
        there = any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.tiktoken", "*.model"))
        hint = "copy tokenizer.json and tokenizer_config.json of the original model there"
        got = _line(error) if there else "none of its files"
        raise FormatError("no tokenizer can be loaded", file=str(folder), got=got, hint=hint) from error


def _model(
    folder: Path, quantized: bool, device: str, dtype: str | None, precision: str | None, fuse: bool, layout: str | None
) -> Any:
    import torch

    to: Any = getattr(torch, dtype) if dtype else None
    try:
        if quantized:
            from halfbyte.hf import from_pretrained

            model = from_pretrained(folder, dtype=to, device_map=device, fuse=fuse, precision=precision, layout=layout)
        else:
            from transformers import AutoModelForCausalLM

            dense: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=to or "auto")
            model = dense.to(device)
    except ImportError as error:
        raise UnavailableError("a package is missing that transformers loads models with", got=_line(error)) from error
    except (KeyError, ValueError, OSError) as error:
        raise FormatError("transformers cannot load this model", file=str(folder), got=_line(error)) from error
    return model.eval()


def _line(error: Exception) -> str:
    """What an exception says first."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
