"""llama.cpp's matrix product, driven by ctypes: ggml's two libraries as they lie in the package llama_cpp.

The package itself is not imported: its own dependencies are not needed. It may be installed, or lie in a folder of
PYTHONPATH. Memory of weights, activations and results is the caller's; ggml's contexts hold only descriptions.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32, Q4_K, NVFP4 = 0, 12, 40
MISSING = "not installed: CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python"


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


def folder() -> Path | None:
    """Where the libraries lie, or None."""
    found = importlib.util.find_spec("llama_cpp")
    for place in (found.submodule_search_locations or ()) if found else ():
        if (Path(place) / "lib" / "libggml-base.so").exists():
            return Path(place) / "lib"
    return None


class Ggml:
    """The libraries, loaded; ImportError where they are not there."""

    def __init__(self, threads: int) -> None:
        at = folder()
        if at is None:
            raise ImportError(MISSING)
        base = ctypes.CDLL(str(at / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(at / "libggml-cpu.so"))
        self.threads = threads
        p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.init = _function(base, "ggml_init", p, _InitParams)
        self.free = _function(base, "ggml_free", None, p)
        self.matrix = _function(base, "ggml_new_tensor_2d", p, p, i, n, n)
        self.product = _function(base, "ggml_mul_mat", p, p, p, p)
        self.graph = _function(base, "ggml_new_graph", p, p)
        self.expand = _function(base, "ggml_build_forward_expand", None, p, p)
        self.data = _function(base, "ggml_get_data", p, p)
        self.row_size = _function(base, "ggml_row_size", ctypes.c_size_t, i, n)
        self.tensor_size = _function(base, "ggml_tensor_overhead", ctypes.c_size_t)
        self.graph_size = _function(base, "ggml_graph_overhead", ctypes.c_size_t)
        self.quantize_rows = _function(base, "ggml_quantize_chunk", ctypes.c_size_t, i, p, p, n, n, n, p)
        self.plan = _function(cpu, "ggml_graph_plan", _Plan, p, i, p)
        self.compute = _function(cpu, "ggml_graph_compute", i, p, ctypes.POINTER(_Plan))
        self.version = _function(base, "ggml_version", ctypes.c_char_p)().decode()
        _function(cpu, "ggml_cpu_init", None)()
        self._data_offset = self._find_data()

    def _find_data(self) -> int:
        """Where a tensor's pointer to its data lies: the place that holds what ggml says it is."""
        context = self.init(_InitParams(1 << 20, None, False))
        tensor = self.matrix(context, F32, 4, 4)
        words = (ctypes.c_uint64 * (self.tensor_size() // 8)).from_address(tensor)
        offset = 8 * list(words).index(self.data(tensor))
        self.free(context)
        return offset

    def at(self, tensor: int, array: NDArray[Any]) -> int:
        """The same tensor, whose values are now the array's memory."""
        ctypes.c_void_p.from_address(tensor + self._data_offset).value = array.ctypes.data
        assert self.data(tensor) == array.ctypes.data
        return tensor

    def quantize(self, kind: int, dense: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Rows of (N, K) f32 as ggml's own quantizer packs them, (N, bytes) u8."""
        n, k = dense.shape
        packed = np.empty((n, self.row_size(kind, k)), np.uint8)
        done = self.quantize_rows(kind, dense.ctypes.data, packed.ctypes.data, 0, n, k, None)
        assert done == packed.nbytes
        return packed


class Products:
    """x @ W.T for each of several packed (N, K) matrices, one graph each; they share x and the result.

    Args:
        weights: (N, bytes of a row) u8 each.
        x: (M, K) f32.
    """

    def __init__(self, ggml: Ggml, kind: int, weights: list[NDArray[np.uint8]], x: NDArray[np.float32]) -> None:
        m, k = x.shape
        n, row = weights[0].shape
        assert row == ggml.row_size(kind, k)
        self.ggml, self.x, self.weights = ggml, x, weights
        self.out = np.empty((m, n), np.float32)
        size = len(weights) * (2 * ggml.tensor_size() + ggml.graph_size()) + 2 * ggml.tensor_size() + (1 << 16)
        self.context = ggml.init(_InitParams(size, None, True))
        activations = ggml.at(ggml.matrix(self.context, F32, k, m), x)
        self.graphs: list[tuple[int, Any]] = []
        self.work = np.empty(0, np.uint8)
        for weight in weights:
            matrix = ggml.at(ggml.matrix(self.context, kind, k, n), weight)
            result = ggml.at(ggml.product(self.context, matrix, activations), self.out)
            graph = ggml.graph(self.context)
            ggml.expand(graph, result)
            plan = ggml.plan(graph, ggml.threads, None)
            if self.work.size < plan.work_size:
                self.work = np.empty(plan.work_size, np.uint8)
            self.graphs.append((graph, plan))
        for _, plan in self.graphs:
            plan.work_data = self.work.ctypes.data

    def run(self, i: int) -> None:
        graph, plan = self.graphs[i]
        assert self.ggml.compute(graph, ctypes.byref(plan)) == 0

    def close(self) -> None:
        self.ggml.free(self.context)


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function
