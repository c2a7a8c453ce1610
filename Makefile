# Two commands do all the set-up on a machine with git, make, cc, Python 3.11 and a stable Rust toolchain:
#   make demo     the main job, with the real gateway
#   make test     every test
# Both make .venv in this folder. tools/venv.py says how, and when it is used again.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done || echo python3)
# Passed on to the program that the target runs: make demo ARGS="--json", make test-python ARGS="-k segment"
ARGS ?=
# The CUDA major version whose cupy `make test-gpu` installs
CUDA ?= 13

VENV_BIN := .venv/bin
SETUP = @$(PYTHON) tools/venv.py
CHECKED := python tests benches examples tools

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-rust test-loom test-python test-gpu lint lint-rust lint-python typecheck format bench wheel setup \
	setup-demo setup-dev setup-gpu clean distclean

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

format: setup-dev ## rewrite the sources in the house's format
	cargo fmt
	$(VENV_BIN)/ruff check --fix $(CHECKED)
	$(VENV_BIN)/ruff format $(CHECKED)

bench: setup-dev ## run the benchmarks, Rust's and Python's
	cargo bench -- --warm-up-time 0.5 --measurement-time 1 --sample-size 20
	$(if $(wildcard benches/*.py),$(VENV_BIN)/python -m pytest --benchmark-only $(ARGS) $(wildcard benches/*.py))

wheel: setup ## build the abi3 wheel into dist/
	$(VENV_BIN)/maturin build --release --locked --out dist

setup: ## make .venv and build the extension in place
	$(SETUP)
setup-demo:
	$(SETUP) demo
setup-dev:
	$(SETUP) dev
setup-gpu:
	$(SETUP) dev cuda$(CUDA)

clean: ## remove what was built, but keep .venv
	rm -rf target dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks python/mmcopy/_native*.so
	find python tests benches examples tools -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf .venv
