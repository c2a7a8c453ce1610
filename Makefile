# Two commands do all the set-up on a machine with git, make, cc, Python 3.11 and a stable Rust toolchain:
#   make demo     the main job, with the real gateway
#   make test     every test
# Both make .venv in this folder, and use it again until something that it depends on changes.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done || echo python3)
# Passed on to the program that the target runs: make demo ARGS="--json", make test-python ARGS="-k segment"
ARGS ?=
# The CUDA major version whose cupy `make test-gpu` installs
CUDA ?= 13

comma := ,
VENV := $(CURDIR)/.venv
VENV_BIN := .venv/bin
PIP = $(VENV_BIN)/python -m pip install $(shell [ -t 2 ] || echo -q) -c constraints.txt
NATIVE := python/mmcopy/_native.abi3.so
# What the extension is built from, and what decides which packages are installed
SOURCES := Cargo.toml Cargo.lock $(shell find rust -type f)
PACKAGES := pyproject.toml constraints.txt Cargo.toml
CHECKED := python tests benches examples

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
# maturin refuses to build with both a venv and conda in the environment
unexport CONDA_PREFIX
.PHONY: help demo test test-rust test-loom test-python test-gpu lint lint-rust lint-python typecheck format bench wheel setup \
	setup-demo setup-dev setup-gpu venv clean distclean

help: ## show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: setup-demo ## run the main job with the real gateway; options: ARGS="--json"
	@$(VENV_BIN)/mmcopy demo $(ARGS)

test: setup-dev test-rust test-loom test-python ## run every test, Rust's and Python's (gpu tests skip without a GPU)

test-rust: ## run the Rust tests
	cargo test

test-loom: ## run the copy pool's hand-over and the arena's leases through every order of their steps
	RUSTFLAGS="--cfg loom" cargo test --release --lib --target-dir target/loom loom

test-python: setup-dev ## run the Python tests; ARGS="-k name" picks
	$(VENV_BIN)/python -m pytest $(ARGS)

test-gpu: setup-gpu ## run the tests that need an NVIDIA GPU; CUDA=12 for a CUDA 12 driver
	@nvidia-smi -L >/dev/null 2>&1 || { echo "no NVIDIA GPU: nvidia-smi -L finds none" >&2; exit 1; }
	$(VENV_BIN)/python -m pytest -m gpu $(ARGS)

lint: lint-rust lint-python typecheck ## check format, lints and types; changes nothing

lint-rust: ## rustfmt, and clippy with warnings denied, with and without the Python module
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --all-targets --features python -- -D warnings

lint-python: setup-dev ## ruff: lints and format; import-linter: arrows between packages point down
	$(VENV_BIN)/ruff check $(CHECKED)
	$(VENV_BIN)/ruff format --check $(CHECKED)
	$(VENV_BIN)/lint-imports

typecheck: setup-dev ## mypy --strict, the typing tests, and the extension against its stub
	$(VENV_BIN)/mypy --strict
	$(VENV_BIN)/mypy --strict tests/typing
	$(VENV_BIN)/python -m mypy.stubtest mmcopy._native

format: setup-dev ## rewrite the sources in the project's format
	cargo fmt
	$(VENV_BIN)/ruff check --fix $(CHECKED)
	$(VENV_BIN)/ruff format $(CHECKED)

bench: setup-dev ## run the benchmarks, Rust's and Python's
	cargo bench -- --warm-up-time 0.5 --measurement-time 1 --sample-size 20
	$(if $(wildcard benches/*.py),$(VENV_BIN)/python -m pytest --benchmark-only $(ARGS) $(wildcard benches/*.py))

wheel: setup ## build the abi3 wheel into dist/
	$(VENV_BIN)/maturin build --release --locked --out dist

# One set-up at a time in this folder. The second make sees what `venv` has replaced.
SET_UP = +@flock Makefile $(MAKE) --no-print-directory venv >&2 && flock Makefile $(MAKE) --no-print-directory -s >&2

setup: ## make .venv and build the extension in place
	$(SET_UP) $(NATIVE)
setup-demo:
	$(SET_UP) .venv/demo.stamp $(NATIVE)
setup-dev:
	$(SET_UP) .venv/dev.stamp $(NATIVE)
setup-gpu:
	$(SET_UP) .venv/dev.stamp .venv/cuda$(CUDA).stamp $(NATIVE)

# A venv holds absolute paths: one of another folder or another Python is replaced, and so is one whose Python has gone.
venv:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "set-up: $(PYTHON) is not Python 3.11 or newer with its venv module: apt-get install python3-venv, or make PYTHON=..." >&2; exit 1; }
	@command -v cc >/dev/null || { echo "set-up: no C compiler, which Rust links with: apt-get install gcc libc6-dev" >&2; exit 1; }
	@command -v cargo >/dev/null || { echo "set-up: no cargo in PATH: install a stable Rust toolchain, for example with rustup" >&2; exit 1; }
	@wanted="$(VENV) $$($(PYTHON) -c 'import sys; print(*sys.version_info[:2])')"; \
	found=$$($(VENV_BIN)/python -c 'import sys; print(sys.prefix, *sys.version_info[:2])' 2>/dev/null); \
	if [ "$$found" != "$$wanted" ] || ! grep -qF -e '!$(VENV)/' -e ' $(VENV)/' -e '"$(VENV)/' $(VENV_BIN)/pip; then \
		[ -z "$$(ls -A .venv 2>/dev/null)" ] || [ -e .venv/pyvenv.cfg ] || \
			{ echo "set-up: .venv is not a virtual environment: move it away" >&2; exit 1; }; \
		echo "==> making .venv" >&2; rm -rf .venv; $(PYTHON) -m venv .venv; \
	fi

.venv/maturin.stamp: $(PACKAGES)
	$(PIP) maturin
	@touch $@

# The old file is removed first: a program that runs with it keeps it, and would die if it were written over.
$(NATIVE): $(SOURCES) .venv/maturin.stamp
	@rm -f $@
	PATH="$(VENV)/bin:$$PATH" VIRTUAL_ENV="$(VENV)" maturin develop --release --skip-install
	@touch $@

.venv/%.stamp: $(PACKAGES) .venv/maturin.stamp
	@echo "==> installing mmcopy[$*]$(if $(filter dev,$*),: about 3 GB with torch the first time$(comma) which takes minutes)" >&2
	@rm -f $(NATIVE)
	PATH="$(VENV)/bin:$$PATH" $(PIP) --no-build-isolation -e '.[$*]'
	@touch $(NATIVE) $(if $(filter dev,$*),.venv/demo.stamp) $@

clean: ## remove what was built, but keep .venv
	rm -rf target dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks python/mmcopy/_native*.so
	find python tests benches examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf .venv
