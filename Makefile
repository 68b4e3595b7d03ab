# Needs Python 3.12 and make; everything else comes from the package index into .venv.
VENV := .venv
BIN := $(VENV)/bin
VLLM := 0.33.0
WHEEL := .cache/wheels/vllm-$(VLLM)-cp312-cp312-linux_x86_64.whl
# The first interpreter that is 3.12; looked for only when .venv has to be made.
python = $(shell for p in python3.12 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
install = $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps

.PHONY: help env demo check test warmup clean
help:
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' $(MAKEFILE_LIST)

env: $(VENV)/.installed ## .venv with the locked dependencies, vLLM's Python build and this package, editable

$(VENV)/.python:
	@test -n "$(python)" || { echo "isojax needs Python 3.12 as python3.12 or python3 on PATH" >&2; exit 1; }
	test -x $(BIN)/python || $(python) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^uv==' requirements.lock)"
	@touch $@

$(VENV)/.locked: requirements.lock $(VENV)/.python
	$(install) -r requirements.lock
	@touch $@

# VLLM_TARGET_DEVICE=empty leaves out the CUDA extensions, which our platform never loads (10 s, 12 MB).
# An order-only prerequisite: a wheel that is there is good, however old.
$(WHEEL): | $(VENV)/.locked
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM) $(BIN)/python -m pip wheel --quiet \
	  --no-deps --no-build-isolation --no-binary vllm -w $(@D) vllm==$(VLLM)

# Bytecode of all packages, once (30 s): where PYTHONDONTWRITEBYTECODE is set every process that imports vLLM would
# compile them again, for 8 seconds. Some packages ship files that are no Python 3.12: they are passed over.
$(VENV)/.installed: pyproject.toml $(VENV)/.locked $(WHEEL)
	$(install) $(WHEEL)
	$(install) --no-build-isolation --editable .
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python3.12/site-packages > /dev/null 2>&1 || true
	@touch $@

demo: env ## a small model trained by vLLM rollouts, every log-probability compared
	JAX_COMPILATION_CACHE_DIR=.cache/jax $(BIN)/isojax demo

check: env ## style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

test: check ## check, then every test that this machine can run
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

warmup: env ## the demo's small policy, made from a seed and taught its task: checkpoints/arithmetic, the same bytes each time
	JAX_COMPILATION_CACHE_DIR=.cache/jax $(BIN)/python -m isojax.rl.warmup checkpoints/arithmetic

clean: ## removes all that make made, the environment and its caches included
	rm -rf $(VENV) .cache/jax .cache/wheels .pytest_cache .ruff_cache .import_linter_cache build dist
