"""How compiled Triton and Gluon code runs on a GPU: compiled once, kept, and launched with little host time.

Triton's own ``kernel[grid](...)`` looks at every argument and constant again in each launch. A ``Program`` is compiled
for stated types instead, and hands addresses and numbers straight to the C function of Triton's launcher. Where that
function is not one of those known here, or a profiler has hooked launches, ``kernel[grid]`` is used; ``plainly`` says
why.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import prod
from types import SimpleNamespace
from typing import Any, Final, cast

from halfbyte.errors import UnavailableError, UsageError
from halfbyte.gpu import missing
from halfbyte.kernels.base import ALIGNED, why_not_torch

KNOWN: Final = ("3.6", "3.8")
"""Versions of Triton whose launcher is called directly."""

GLUON: Final = ((3, 6), (3, 8))
"""Oldest and newest Triton with which kernels in Gluon are tested: its names change."""

_log = logging.getLogger("halfbyte")
_lock: Final = threading.RLock()
_programs: Final[dict[Any, Program]] = {}


def why_not(call: Any, *, least: int = 80, most: int | None = None, gluon: bool = False) -> tuple[str, ...]:
    """What keeps every kernel for NVIDIA GPUs from a call.

    Args:
        call: what is asked for, a Call or what has the same of its fields.
        least: the compute capability that a kernel needs, 90 for sm_90.
        most: the last one that it runs on.
        gluon: it is written in Gluon.
    """
    if call.device != "cuda":
        return (f"runs on NVIDIA GPUs, not on {call.device}", *why_not_torch(call.library, call.elsewhere))
    reasons = list(why_not_torch(call.library, call.elsewhere))
    if not call.capability:
        reasons.append("needs an NVIDIA GPU, and torch sees none")
    elif not least <= call.capability <= (most or call.capability):
        span = f"sm_{least} or later" if most is None else f"sm_{least}" + (f" to sm_{most}" if most > least else "")
        reasons.append(f"is for {span}, not sm_{call.capability}")
    if not call.aligned:
        reasons.append(f"takes codes and scales that begin at multiples of {ALIGNED} bytes; clone the buffers")
    if not call.whole:
        reasons.append("takes codes, scales and scale2 without gaps; make the buffers contiguous")
    lacking = None if call.elsewhere else missing() or (untested() if gluon else None)
    return (*reasons, lacking) if lacking else tuple(reasons)


@functools.cache
def untested() -> str | None:
    """Why no kernel in Gluon runs with this Triton; None where they are tested with it."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    if GLUON[0] <= (int(major), int(minor)) <= GLUON[1]:
        return None
    oldest, newest = (".".join(map(str, version)) for version in GLUON)
    return f"Gluon is tested with Triton {oldest} to {newest}, not {triton.__version__}"


BITS: Final = {"i32": 32, "fp32": 32, "bf16": 16, "fp16": 16, "i8": 8, "u8": 8, "fp8e4nv": 8}
"""Of the types of boxes."""


def boxes(of: str, box: Sequence[int], swizzle: int) -> str:
    """The type, in a signature, of a tensor that the copy engine (TMA) moves in boxes: an argument is a ``Tensor``.

    Args:
        of: the type of an element, as in ``BITS``.
        box: its extents, powers of two, at most 256 each.
        swizzle: bytes of the pattern in shared memory; 0, 32, 64 or 128.
    """
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={BITS[of]}, rank={len(box)})"
    return f"tensordesc<{of}[{','.join(map(str, box))}],{layout}>"


class Tensor:
    """A tensor in global memory for the copy engine, of a program's argument; made by ``Program.tensor``.

    Attributes:
        values: what the launcher takes for it.
    """

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.address, self.shape, self.strides = address, shape, strides
        self.values: tuple[Any, ...] = ()


class Program:
    """A kernel compiled for one set of types, constants and options, on one device; calling it launches it.

    A launch goes to the current stream of the program's device and may be captured in a CUDA graph. Arguments that are
    moved in boxes come first.

    Attributes:
        name: of the kernel.
        compiled: Triton's CompiledKernel, or None under the interpreter.
        plainly: why launches go through ``kernel[grid]``; None where they take the short way.
    """

    def __init__(
        self, name: str, compiled: Any, index: int, types: Sequence[str], plain: Callable[..., None], pdl: bool = False
    ) -> None:
        self.name = name
        self.compiled = compiled
        self._plain = plain
        self._index = index
        self._boxed = sum(map(_in_boxes, types))
        self.plainly: str | None = "it runs in Triton's interpreter" if compiled is None else unknown()
        if self.plainly:
            return
        import torch
        from triton import knobs

        found = _direct(compiled, types, pdl)
        if isinstance(found, str):
            self.plainly = found
            return
        self._launch, self._before, self._after = found
        self._stream = torch._C._cuda_getCurrentRawStream
        self._current = torch._C._cuda_getDevice
        self._runtime = knobs.runtime
        self._enter, self._exit = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook

    def __call__(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """Launch.

        Args:
            grid: programs along three axes; none are launched where one is 0.
            args: for each entry of the signature, in its order, a number; for pointers an address
                (``tensor.data_ptr()``, the cheapest), a tensor, or None; for what is moved in boxes a ``Tensor`` that
                ``tensor`` of this program made, or of another whose type of it is the same.
        """
        if self.plainly:
            self._plain(grid, args)
            return
        index, runtime, enter, leave = self._index, self._runtime, self._enter, self._exit
        if self._current() != index:
            import torch

            with torch.cuda.device(index):
                self(grid, args)
        elif (
            enter.calls
            or leave.calls
            or runtime.launch_enter_hook is not enter
            or runtime.launch_exit_hook is not leave
        ):
            self._plain(grid, args)
        else:
            if boxed := self._boxed:
                args = (*chain.from_iterable([a.values for a in args[:boxed]]), *args[boxed:])
            if self._after is None:
                self._launch(*grid, self._stream(index), *self._before, args)
            else:
                self._launch(*grid, self._stream(index), *self._before, *args, *self._after)

    def tensor(
        self, place: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> Tensor:
        """A tensor for the argument at ``place``, which is moved in boxes.

        Args:
            place: in the signature.
            address: a multiple of 16.
            shape: elements along each axis.
            strides: in elements, the last 1 and the others multiples of 16 bytes; by default there are no gaps.
        """
        if strides is None:
            strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        made = Tensor(address, shape, strides)
        if self.plainly is None:
            base = SimpleNamespace(data_ptr=lambda: address)
            given = SimpleNamespace(base=base, shape=shape, strides=strides, padding="zero", round_f32_to_tf32=False)
            made.values = tuple(_described()(given, self.compiled.metadata.tensordesc_meta[place]))
        return made


@dataclass(frozen=True)
class Source:
    """What decides the machine code of a program, for a compute capability; the arguments of ``compile_for``."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def key(self) -> Any:
        """Equal for equal machine code."""
        return self.kernel, *self.signature.items(), None, *self.constants.items(), None, *self.options.items()


_recorded: list[Source] | None = None


@contextmanager
def recorded() -> Iterator[list[Source]]:
    """While it lasts ``program`` makes nothing and needs no GPU; the list tells what it was asked for."""
    global _recorded  # noqa: PLW0603
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def program(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    device: Any,
    warps: int = 4,
    stages: int = 3,
    pdl: bool = False,
    maxnreg: int | None = None,
) -> Program:
    """A kernel, compiled; the same one for the same arguments. Triton keeps the machine code on disk.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``; its constants come last.
        signature: the type of each parameter that is no constant, in order, as in ``{"x": "*bf16:16", "m": "i32"}``:
            ``*`` is a pointer, ``:16`` states that the address, or number, is a multiple of 16. Pointers may be to
            another type than the tensor's: "*i32:16" for codes of bytes.
        constants: the values of the others; hashable.
        device: a CUDA device of torch's; "cpu" under Triton's interpreter.
        warps: of a program.
        stages: of Triton's pipelines.
        pdl: launched before the kernel ahead of it ends (``griddepcontrol``), which it then must wait for; the machine
            code is the same.
        maxnreg: registers of a thread, at most.

    Raises:
        UsageError: names that do not fit the kernel, or a first call while a CUDA graph is captured.
        UnavailableError: the device is not there or too small, or the folder for machine code cannot be written.
    """
    options = options_of(warps=warps, stages=stages, maxnreg=maxnreg)
    if _recorded is not None:
        _recorded.append(Source(kernel, signature, constants, options))
        return cast(Program, None)
    import torch

    device = torch.device(device)
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    key = (kernel, index, *signature.items(), None, *constants.items(), None, *options.items(), pdl)
    known = _programs.get(key)
    if known is not None:
        return known
    with _lock:
        if key not in _programs:
            _programs[key] = _make(kernel, signature, constants, options, index, pdl)
        return _programs[key]


def options_of(*, warps: int = 4, stages: int = 3, maxnreg: int | None = None) -> dict[str, Any]:
    """What of ``program``'s arguments decides the machine code, as Triton's options."""
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return options if maxnreg is None else options | {"maxnreg": maxnreg}


def _make(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    options: dict[str, Any],
    index: int | None,
    pdl: bool,
) -> Program:
    import torch

    plain = _plainly(kernel, signature, constants, options | ({"launch_pdl": True} if pdl else {}), index)
    types = tuple(signature.values())
    if index is None:
        return Program(kernel.__name__, None, 0, types, plain)
    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a kernel cannot be compiled while a CUDA graph is captured",
            got=kernel.__name__,
            hint="make the same call once before the capture",
        )
    with torch.cuda.device(index):
        major, minor = torch.cuda.get_device_capability(index)
        compiled = compile_for(10 * major + minor, kernel, signature, constants, options)
        try:
            compiled._init_handles()
        except Exception as error:
            raise UnavailableError(
                "this GPU cannot load a kernel", got=f"{kernel.__name__}: {str(error).splitlines()[0]}"
            ) from error
    return Program(kernel.__name__, compiled, index, types, plain, pdl)


def compile_for(
    capability: int, kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """Triton's CompiledKernel for a compute capability (90 for sm_90); needs no GPU. Arguments as of ``program``.

    The first compilation in a process that does not come from disk is announced.

    Raises:
        UsageError: names that do not fit the kernel.
        UnavailableError: the folder for machine code cannot be written.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if list(kernel.arg_names) != [*signature, *constants]:
        raise UsageError(
            f"the arguments do not fit the kernel {kernel.__name__}",
            got=", ".join([*signature, *constants]),
            expected=", ".join(kernel.arg_names),
        )
    types = {name: of.removesuffix(":16") for name, of in signature.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, of in enumerate(signature.values()) if of.endswith(":16")}
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    source = Source(
        kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(len(types) + i,): value for i, value in enumerate(constants.values())},
        attrs=aligned,
    )
    make_ir = source.make_ir

    def announced(*args: Any, **kwargs: Any) -> Any:
        _announce(capability)
        return make_ir(*args, **kwargs)

    source.make_ir = announced  # which Triton calls where nothing is kept
    try:
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except OSError as error:
        raise UnavailableError(
            "machine code cannot be kept", got=str(error), hint="set TRITON_CACHE_DIR to a folder that can be written"
        ) from error
    finally:
        del source.make_ir


def settle() -> None:
    """What a process that only compiles begins with: it says nothing, and leaves Ctrl-C to the one that began it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _log.setLevel(logging.ERROR)


def compile_named(
    capability: int,
    module: str,
    name: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> str:
    """``compile_for`` of a kernel by its name, into Triton's folder, for another process; why it failed, or nothing.

    Not every error survives the way between processes.
    """
    try:
        compile_for(capability, getattr(importlib.import_module(module), name), signature, constants, options)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


@functools.cache
def _announce(capability: int) -> None:
    """One line in a process, the first time that something is compiled."""
    from triton import knobs

    _log.warning("compiling for sm_%d; the code is kept in %s", capability, knobs.cache.dir)


@functools.cache
def unknown() -> str | None:
    """Why no launch takes the short way; None where this Triton's launcher is known, or there is no Triton."""
    if missing():
        return None
    import triton

    version = triton.__version__
    if ".".join(version.split(".")[:2]) in KNOWN:
        return None
    return (
        f"the launcher of Triton {version} is not known (those of {' and '.join(KNOWN)} are): "
        "each launch goes through kernel[grid], which costs the host more"
    )


@functools.cache
def _described() -> Callable[[Any, Any], list[Any]]:
    """Triton's function that describes a tensor to the copy engine; later versions give it a third argument."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    if len(inspect.signature(make_tensordesc_arg).parameters) == 2:
        return make_tensordesc_arg  # type: ignore[no-any-return]
    return lambda given, metadata: make_tensordesc_arg(given, metadata, None)


def _in_boxes(of: str) -> bool:
    return of.startswith("tensordesc")


def _direct(
    compiled: Any, types: Sequence[str], pdl: bool
) -> tuple[Any, tuple[Any, ...], tuple[None, ...] | None] | str:
    """The launcher's C function, what it takes before and after arguments of types, or why it cannot be called.

    What comes after is None where the arguments are one tuple. For a tensor that is moved in boxes it takes the copy
    engine's description, the extents and the strides.
    """
    launcher, packed = compiled.run, compiled.packed_metadata
    boxed = [of[: of.index("]")].count(",") + 1 for of in types if _in_boxes(of)]
    count = len(types) + 2 * sum(boxed)
    try:
        launch = launcher.launch
        if boxed:
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
            return f"{compiled.name} needs scratch memory of Triton's"
        before = (compiled.function, launcher.launch_cooperative_grid, pdl)
        if hasattr(launcher, "arg_annotations"):
            annotations = launcher.arg_annotations[:count]
            hooks = (None, None, None, None, None)
            return launch, (*before, packed, *hooks, annotations, launcher.kernel_signature), None
        constants = (None,) * (len(compiled.src.fn.arg_names) - len(types))
        return launch, (*before, None, None, packed, None, None, None), constants
    except (AttributeError, KeyError, TypeError) as error:
        return f"Triton's launcher is not as expected ({error})"


class _Address:
    """An address as ``kernel[grid]`` takes it."""

    def __init__(self, address: int, dtype: Any) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


def _plainly(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    index: int | None,
) -> Callable[[Sequence[int], Sequence[Any]], None]:
    """The launch through ``kernel[grid]``, with pointers of the signature's types, on a device if one is given."""
    import torch
    import triton
    import triton.language as tl

    def dtype(of: str) -> Any:
        short = of.removesuffix(":16").removeprefix("*")
        long = (("bf", "bfloat"), ("fp", "float"), ("u", "uint"), ("i", "int"))
        return next(getattr(tl, name + short[len(letters) :]) for letters, name in long if short.startswith(letters))

    def boxed(of: str) -> tuple[Any, list[int], Any]:
        from triton.experimental.gluon.language import NVMMASharedLayout

        name, box, layout = of.removeprefix("tensordesc<").replace("[", "]").split("]")
        made = NVMMASharedLayout(*(int(n) for n in re.findall(r"=(\d+)", layout)))
        return dtype(name), [int(n) for n in box.split(",")], made

    types = [boxed(of) if _in_boxes(of) else dtype(of) if of.startswith("*") else None for of in signature.values()]

    def pointer(value: Any, of: Any) -> Any:
        if of is None or value is None:
            return value
        if isinstance(of, tuple):
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            kind, box, layout = of
            return TensorDescriptor(_Address(value.address, kind), list(value.shape), list(value.strides), box, layout)
        return _Address(value, of) if isinstance(value, int) else triton.reinterpret(value, of)

    def run(grid: Sequence[int], args: Sequence[Any]) -> None:
        if all(grid):
            values = [pointer(value, of) for value, of in zip(args, types, strict=True)]
            with nullcontext() if index is None else torch.cuda.device(index):
                kernel[tuple(grid)](*values, **constants, **options)

    return run
