"""The arrows of import, the completeness of the tables, and what a fresh process must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import halfbyte
from checkpoints import GOLDENS, SOURCE, environment

BASE = ("errors", "findings", "numerics", "stored", "patterns", "jit", "gpu")
MEANING = (*BASE, "arrays", "kinds", "weight")
FILES = (*MEANING, "recipes", "layouts")
STACKS = ("modules", "experts", "reading")
RUN = (*MEANING, "lossy", "layouts", "kernels")
ARROWS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "jit": ("errors",),
    "findings": ("errors",),
    "explanations": ("errors", "findings"),
    "numerics": ("errors",),
    "stored": ("errors",),
    "patterns": ("errors", "numerics"),
    "tasks": ("errors", "jit"),
    "modules": BASE,
    "experts": (*BASE, "modules"),
    "bundles": (*BASE, "modules", "experts"),
    "arrays": BASE,
    "kinds": (*BASE, "arrays"),
    "shifts": (*BASE, "arrays"),
    "vectors": (),
    "decode_code": (*BASE, "vectors"),
    "gpu": (),
    "decode_cuda_code": (),
    "decode_cuda": (*BASE, "arrays", "decode_cuda_code"),
    "decode": (*BASE, "arrays", "vectors", "decode_code", "decode_cuda"),
    "weight": (*BASE, "arrays", "kinds", "shifts", "decode"),
    "lossy": MEANING,
    "underflow": MEANING,
    "fragments": MEANING,
    "suspicion": ("errors", "layouts"),
    "mxfp4": MEANING,
    "casts": (*MEANING, "mxfp4", "modules"),
    "recipes": (*MEANING, "vectors"),
    "activations": FILES,
    "layouts": (*MEANING, "decode", "decode_cuda"),
    "diagnose": (*MEANING, "layouts", *STACKS),
    "twins": (*FILES, *STACKS, "diagnose", "dialects", "checkpoint"),
    "reading": (*MEANING, "layouts", "modules", "experts"),
    "cuts": (*BASE, "modules"),
    "dialects": (*FILES, "modules", "experts", "bundles"),
    "checkpoint": (*FILES, *STACKS, "tasks", "dialects"),
    "writing": (*FILES, *STACKS, "tasks", "dialects", "checkpoint"),
    "tools": (
        *FILES,
        *STACKS,
        "bundles",
        "decode",
        "underflow",
        "suspicion",
        "tasks",
        "diagnose",
        "twins",
        "casts",
        "cuts",
        "dialects",
        "checkpoint",
        "writing",
        "tiers",
        "forms",
        "plans",
        "products",
    ),
    "cli": (
        *FILES,
        *STACKS,
        "explanations",
        "dialects",
        "checkpoint",
        "tools",
        "tuning",
        "tuning_cuda",
        "session",
        "model_bench",
    ),
    "kernels": (
        *MEANING,
        "lossy",
        "layouts",
        "activations",
        "decode_cuda",
        "decode_cuda_code",
        "vectors",
        "decode_code",
    ),
    "tiers": RUN,
    "operands": RUN,
    "int8_ops": (*RUN, "lossy", "operands"),
    "w4a4_ops": (*RUN, "operands"),
    "fp8_ops": (*RUN, "lossy", "operands", "remembered"),
    "forms": RUN,
    "plans": (*RUN, "operands", "int8_ops", "fp8_ops", "forms"),
    "embedding_op": (*RUN, "operands", "remembered", "torch_embedding"),
    "torch_embedding": (*RUN, "embedding_op"),
    "route_op": (*RUN, "operands", "remembered", "torch_routing"),
    "torch_routing": (*RUN, "route_op"),
    "remembered": (*RUN, "operands"),
    "step_ops": (*RUN, "operands", "remembered"),
    "ops": (*RUN, "operands", "int8_ops", "fp8_ops", "w4a4_ops", "plans", "remembered", "torch_ops"),
    "torch_ops": (*RUN, "operands", "ops", "fp8_ops", "int8_ops", "w4a4_ops"),
    "expert_ops": (*RUN, "operands", "remembered"),
    "torch_experts": (*RUN, "torch_ops", "expert_ops"),
    "nn": (
        *RUN,
        "operands",
        "forms",
        "ops",
        "torch_ops",
        "embedding_op",
        "torch_embedding",
        "expert_ops",
        "torch_experts",
    ),
    "decoder": (*RUN, "ops", "nn", "step_ops", "route_op"),
    "hf": (
        *(*RUN, *STACKS, "recipes", "dialects", "checkpoint", "writing", "cuts", "operands", "ops", "torch_ops", "nn"),
        "parallel",
    ),
    "products": (*BASE, "modules", "experts", "cuts"),
    "session": (*RUN, *STACKS, "dialects", "checkpoint", "plans", "timing", "decoder", "hf"),
    "model_bench": ("errors", "findings", "decoder", "session", "timing"),
    "parallel": (*RUN, "nn"),
    "timing": BASE,
    "trials": (*RUN, "lossy"),
    "tuned": BASE,
    "tuning": (*RUN, "fp8_ops", "tuned"),
    "tuning_cuda": (*RUN, "timing", "trials", "tuning"),
}
"""Part of the package -> the parts that it may import: errors <- findings, numerics, stored, patterns <- arrays <-
kinds, shifts <- weight <- recipes, layouts; layouts <- dialects <- checkpoint <- writing <- tools <- cli, and
layouts, lossy <- kernels <- operands <- int8_ops, remembered <- fp8_ops <- plans <- ops <- expert_ops <- nn; kernels <-
tiers <- tools, for doctor; kernels <- forms <- plans <- tools, for plan; kernels, timing, trials <- tuning <-
tuning_cuda <- cli, for tune."""

CHAINS = {
    "checkpoint": {
        "reader": {"header"},
        "writer": {"header", "reader", "workdir"},
        "outputs": {"header", "reader", "writer"},
        "consistency": {"header", "reader", "expert_checks"},
    },
    "decoder": {
        "families": {"product"},
        "step": {"families", "product"},
        "runner": {"families", "sampling", "step"},
        "whole": {"sampling"},
        "loop": {"families", "runner", "sampling", "whole"},
    },
    "kernels": {
        "attention_base": {"base", "descriptors"},
        "fmha_llm": {"attention_base", "descriptors"},
        "fmha_vit": {"attention_base", "descriptors"},
        "attention": {"base", "attention_base", "fmha_llm", "fmha_vit"},
        "reference": {"base"},
        "int8": {"base"},
        "fp8": {"base"},
        "w4a4": {"base"},
        "embedding": {"base"},
        "in_order": {"base"},
        "step": {"base", "in_order"},
        "step_torch": {"base", "step"},
        "gated": {"base", "in_order", "step"},
        "experts": {"base", "step"},
        "grouped": {"base"},
        "experts_torch": {"base", "experts", "fp8", "grouped", "step_torch", "w4a4", "cuda.shared"},
        "pick": {"base", "step"},
        "routing": {"base", "step"},
        "dense": {"base", "step"},
    },
    "kernels.cpu": {
        "exact": {"product_code"},
        "experts": {"exact", "experts_code", "product_code"},
        "experts_code": {"activation_code", "product_code", "scalars"},
        "activation_code": {"scalars"},
        "int8": {"exact", "int8_code"},
        "int8_code": {"scalars", "vectors"},
        "panels": {"exact"},
        "product_code": {"scalars", "tiles", "vectors"},
        "scalars": {"vectors"},
        "step": {"step_code"},
        "dense": {"dense_code"},
        "dense_code": {"scalars"},
        "step_code": {"activation_code", "scalars"},
        "tiles": {"vectors"},
    },
    "nn": {
        "linear": {"base"},
        "grouped": {"base", "linear"},
        "embedding": {"base"},
        "experts": {"base"},
        "fp8": {"base"},
        "swap": {"linear"},
    },
    "parallel": {
        "push": {"push_code"},
        "copies": {"push_code"},
        "ranks": {"copies", "push"},
        "layers": {"copies", "ranks"},
        "experts": {"layers", "ranks"},
        "styles": {"experts", "layers", "ranks"},
    },
    "hf": {
        "filling": {"fusing", "names", "pending", "plan", "reading", "report", "saving", "splitting"},
        "splitting": {"names", "plan"},
        "loading": {"filling", "quantizer"},
        "plan": {"fusing", "names", "report"},
        "quantizer": {"filling", "pending"},
        "choosing": {"fusing"},
        "quantizing": {"choosing", "fusing", "quantizer", "report", "saving"},
    },
    "recipes": {"base": {"blocks_code"}, "cuda": {"base", "cuda_code"}, "rtn": {"base", "blocks_code", "cuda"}},
}
"""In checkpoint: header <- reader <- writer <- outputs, and expert_checks, reader <- consistency; workdir <- writer.
In hf: names, fusing <- plan <- filling <- quantizer <- loading, and saving <- filling; choosing <- quantizing.
In kernels: descriptors, base <- attention_base <- fmha_llm, fmha_vit <- attention.
What ends in _code is loaded only to run."""

CUDA = {"choices", "launch", "shared", "refused", "fragments", "fp8_quantize", "lists"}
"""In kernels.cuda: what every kernel may import, beside its own device code, the file of its name and _code."""

TILED = {
    "gemm_gluon": {"decode_gluon"},
    "fp8_gluon": {"gemm_gluon"},
    "attend_gluon": {"step"},
    "experts_decode": {"decode_gluon", "experts", "experts_held_code"},
    "experts_gemm": {"gemm_gluon", "fp8_gluon", "experts", "experts_order"},
    "experts_fp8": {"experts_gemm", "experts"},
    "grouped_gluon": {"experts_gemm"},
    "experts_triton": {"experts"},
    "grouped_triton": {"experts_triton"},
}
"""In kernels.cuda: whose parts a kernel has."""

EXECUTORS = {
    "order": set(),
    "executors": {"order", "compiled", "cuda"},
    "blocks": {"executors", "blocks_kernel"},
    "base": {"order", "executors", "blocks"},
    "cuda": {"order", "executors", "cuda_kernel"},
}
LAYOUT = {"order", "executors", "blocks", "base"}
"""In layouts: order <- executors <- base <- each layout; executors run those that are compiled, the one for CUDA
tensors loaded only to run."""

MODULES = sorted(SOURCE.rglob("*.py"))
ids = pytest.mark.parametrize("file", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))


def dotted(file: Path) -> str:
    """halfbyte.tools.verify for its file, halfbyte.tools for the package's own."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(file): file for file in MODULES}


def imported(file: Path) -> set[str]:
    """The modules of halfbyte that a file imports anywhere, also inside functions and for types."""
    package = dotted(file).split(".") if file.name == "__init__.py" else dotted(file).split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in NAMES else base for a in node.names}
    return {name for name in found if name == "halfbyte" or name.startswith("halfbyte.")}


@ids
def test_arrows(file):
    name = dotted(file)
    if name in ("halfbyte", "halfbyte.__main__"):
        return
    part = name.split(".")[1]
    assert part in ARROWS, f"{part} has no place in the arrows: add it to ARROWS and to the architecture page"
    allowed = {*ARROWS[part], part}
    wrong = {other for other in imported(file) if other != "halfbyte" and other.split(".")[1] not in allowed}
    assert not wrong, f"{name} may import {sorted(allowed)}"


@ids
def test_nothing_is_imported_sideways(file):
    """Inside a folder only its base.py, or what its chain says, and by its own __init__ all of it."""
    name = dotted(file)
    if file.name in ("__init__.py", "__main__.py") or name.count(".") < 2:
        return
    folder, own = name.rsplit(".", 1)
    siblings = {other for other in imported(file) if other.startswith(f"{folder}.")}
    if folder.removeprefix("halfbyte.") in CHAINS:
        allowed = {f"{folder}.{sibling}" for sibling in CHAINS[folder.removeprefix("halfbyte.")].get(own, ())}
    elif folder == "halfbyte.kernels.cuda":
        codes = {s for s in siblings if s.endswith("_code") and own.endswith("_code")}
        codes |= {f"{folder}.{sibling}" for sibling in TILED.get(own, ())}
        allowed = codes | {f"{folder}.{sibling}" for sibling in (CUDA | {f"{own}_code"}) - {own}}
    else:
        names = EXECUTORS.get(own, LAYOUT) if folder == "halfbyte.layouts" else {"base"} - {own}
        allowed = {f"{folder}.{sibling}" for sibling in names}
    assert siblings <= allowed


def test_kernels_see_no_files_and_files_no_kernels():
    for name, file in NAMES.items():
        part = f"{name}.".split(".")[1]
        others = {other.split(".")[1] for other in imported(file) if other.count(".")}
        if part in ("kernels", "operands", "int8_ops", "fp8_ops", "plans", "remembered", "ops"):
            assert not others & {"checkpoint", "dialects", "tools", "cli", "stored", "findings"}, name
        if part in ("checkpoint", "dialects", "tools", "recipes", "layouts", "arrays", "kinds", "shifts", "weight"):
            assert not others & {"kernels", "ops", "nn"}, name


@ids
def test_no_star_imports_and_no_registering_decorators(file):
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert "*" not in [a.name for a in node.names]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert not [
                d for d in node.decorator_list if "register" in ast.unparse(d) and "torch" not in ast.unparse(d)
            ]


NO_KERNELS = (
    "base",
    "compiled",
    "drawing",
    "choices",
    "ceilings",
    "launch",
    "shared",
    "refused",
    "fp8_quantize",
    "fp8_quantize_code",
    "lists",
    "lists_code",
    "experts",
)
TABLES = {"layouts": "LAYOUTS", "recipes": "RECIPES", "dialects": "DIALECTS", "kernels": "KERNELS"}


@pytest.mark.parametrize("folder", TABLES)
def test_every_module_is_in_its_table(folder):
    """Read off the source: what the table's lines name, from which module each name comes, and what those import."""
    package = SOURCE / folder / "__init__.py"
    tree = ast.parse(package.read_text())
    homes = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                homes[alias.asname or alias.name] = inner if inner in NAMES else node.module
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and TABLES[folder]
        in [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    )
    assert isinstance(table, ast.Tuple), "an explicit tuple, so that readers can grep it"
    reached = {homes[n.id] for n in ast.walk(table) if isinstance(n, ast.Name) and n.id in homes}
    modules = {name for name, f in NAMES.items() if name.startswith(f"halfbyte.{folder}.") and f.name != "__init__.py"}
    grown: set[str] = set()
    while reached - grown:
        grown |= reached
        reached |= {other for name in grown & modules for other in imported(NAMES[name])} & modules
    missing = {name for name in modules if name.rsplit(".", 1)[1] not in NO_KERNELS} - reached
    assert not missing


@pytest.mark.parametrize("folder", ["layouts", "recipes", "dialects"])
def test_names_in_a_table_are_unique(folder):
    module = __import__(f"halfbyte.{folder}", fromlist=["x"])
    names = [entry.name for entry in getattr(module, TABLES[folder])]
    assert len(names) == len(set(names))


# --- the public names


def test_all_is_sorted_and_complete():
    assert halfbyte.__all__ == sorted(set(halfbyte.__all__))
    assert {*halfbyte.__all__, "nn"} == {*halfbyte._HOMES, *halfbyte._MODULES, "__version__"}
    assert dir(halfbyte) == halfbyte.__all__


def test_type_checkers_see_the_same_names():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {a.asname or a.name for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert seen - {"Any", "nn"} == set(halfbyte.__all__) - {"__version__"}


def test_every_name_resolves():
    """In a process of its own; without torch the run side says what to install."""
    code = """
import halfbyte
for name in halfbyte.__all__:
    try:
        getattr(halfbyte, name)
    except halfbyte.errors.MissingExtraError as error:
        assert "halfbyte[torch]" in str(error), name
"""
    assert python(code) == ""


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="halfbyte"):
        _ = halfbyte.nothing


@pytest.mark.parametrize("name", ["Checkpoint", "Finding", "HalfbyteError", "Report", "Weight", "convert", "verify"])
def test_names_are_documented(name):
    assert getattr(halfbyte, name).__doc__


# --- what is loaded when


def python(code, *args):
    """Run code in a fresh process; returns its stdout."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = "import sys; print(*sorted({m.split('.')[0] for m in sys.modules} & {'numpy','torch','numba','rich','click'}))"


def test_import_halfbyte_loads_nothing():
    assert python(f"import halfbyte; {LOADED}") == "\n"


def test_the_file_side_needs_no_torch(tmp_path):
    """Torch, transformers and numba cannot even be imported here."""
    code = """
import sys
for name in ("torch", "transformers", "numba", "triton", "safetensors"):
    sys.modules[name] = None
import halfbyte as hb
source, out = sys.argv[1:]
hb.inspect(source, stats=True)
assert hb.verify(source).ok
hb.convert(source, out + "/ct", to="compressed-tensors", prove=True)
hb.convert(out + "/ct", out + "/back", to="modelopt", prove=True)
hb.dequantize_checkpoint(out + "/back", out + "/dense")
hb.quantize_checkpoint(out + "/dense", out + "/again", share_scale2=True)
with hb.open(out + "/again") as checkpoint:
    for name, weight in checkpoint.weights():
        assert hb.quantize(weight.dequantize()).shape == weight.shape
print("done")
"""
    assert python(code, GOLDENS["modelopt_llama_nvfp4"], tmp_path) == "done\n"


@pytest.mark.parametrize("module", ["weight", "layouts", "recipes", "dialects", "checkpoint.reader", "tools.convert"])
def test_no_module_of_the_file_side_loads_torch(module):
    out = python(f"import halfbyte.{module}; {LOADED}")
    assert not {"torch", "numba", "rich"} & set(out.split())


def test_reading_loads_nothing_that_writes():
    writing = {"halfbyte.writing", "halfbyte.checkpoint.writer", "concurrent.futures.process", "multiprocessing"}
    reading = ", ".join(f"halfbyte.tools.{verb}" for verb in ("inspect", "verify", "diff"))
    code = f"import sys, {reading}; print({writing} & {{*sys.modules}})"
    assert python(code) == "set()\n"
