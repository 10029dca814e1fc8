# Every target does its own set-up: a virtual environment in .venv, pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all check real-model benchmarks notebooks docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,datasets,eval,notebooks]"
	touch $(STAMP)

demo: $(STAMP)  ## quantize the embedded model for Ascend, read it back, show what it is worth
	$(BIN)/qwen_quantize --device ascend --quant-method ue8m0 --output-path build/demo --overwrite

test: $(STAMP)  ## the default suite: a few minutes
	$(BIN)/python -m pytest -q -m "not slow"

test-all: $(STAMP)  ## the slow ones too
	$(BIN)/python -m pytest -q

check: $(STAMP)  ## format, lint, types, import direction, fast tests, wheel content
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q -m "not slow"
	rm -rf build/wheel && $(BIN)/python -m build --wheel --no-isolation --outdir build/wheel .
	$(BIN)/check-wheel-contents build/wheel

real-model: $(STAMP)  ## fetch SmolLM2-135M-Instruct (93 MB) and texts for it into build/real-model
	$(BIN)/python tools/real_model.py --cache build/real-model

benchmarks: $(STAMP)  ## throughput of the number formats on this machine
	$(BIN)/python benchmarks/casts.py

notebooks: $(STAMP)  ## run them all and keep their outputs: some minutes
	$(BIN)/python tools/make_notebooks.py

docs: $(STAMP)  ## the site, into build/site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/python tools/command_reference.py
	$(BIN)/python tools/arithmetic_figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist out *.egg-info
