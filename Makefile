# make setup | train | race-demo | elastic-demo | test | check | wheels | docs | site | sbom. Everything runs in .venv, made from the locked requirements.txt.
PYTHON ?= python3
RUN := .venv/bin/python
PACKAGES := .venv/.ready
READY := .venv/.segpipe
# The suite starts hundreds of processes, and each would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(RUN) -m pip install --disable-pip-version-check --no-input --quiet
# make setup CPU=1 (or train, ...) leaves out 3 GB of CUDA; torch is then what pip finds for this, and torchvision is missing.
TORCH ?= torch>=2.11

.PHONY: setup packages train race-demo elastic-demo test quick mutants check wheels docs site sbom lock clean

setup: $(READY)
packages: $(PACKAGES)

# All but segpipe itself: a layer of an image that only the lock changes.
$(PACKAGES): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
ifdef CPU
	$(RUN) packaging/cpu.py "$(TORCH)" > .venv/cpu.txt
	$(PIP) --require-hashes --no-deps -r .venv/cpu.txt
	$(PIP) --no-deps "$(TORCH)"
else
	$(PIP) --require-hashes -r requirements.txt
endif
	@touch $@

# segpipe is installed from this folder, so that a change of the source takes effect at once.
$(READY): $(PACKAGES) pyproject.toml
	$(PIP) --no-deps --no-build-isolation --editable .
	$(RUN) -c 'import torch, albumentations, cv2; print("torch", torch.__version__)'
	@touch $@

train: $(READY)
	$(RUN) train.py experiment=street_cpu run.exists=replace

# A transform that shares state between calls: unnoticed elsewhere, stopped here. See docs/race.md.
race-demo: $(READY)
	$(RUN) examples/race/demo.py

# A machine is lost during a training, and comes back: the weights are those of an undisturbed one. See docs/cluster.md.
elastic-demo: $(READY)
	$(RUN) examples/elastic/demo.py

check: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	cd segpipe && ../$(RUN) -m mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache --python-version 3.10 --follow-imports silent runtime

# A third process works while others wait for a timeout.
test: check
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# What matters, in about 2 minutes: all tests but those that start processes or take long.
quick: $(READY)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

# Changes the core in one place at a time and runs that module's tests: which change does no test notice? 15 minutes;
# python -m benchmarks.mutants --all tries every change.
mutants: $(READY)
	$(RUN) -m benchmarks.mutants

# dist/segpipe-*.whl, and dist/segpipe_runtime-*.whl with segpipe/runtime alone, for robots.
wheels: $(READY)
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . ./packaging/runtime

docs: $(READY)
	$(RUN) scripts/settings_page.py > docs/settings.md
	$(RUN) scripts/settings_page.py commands > tests/cli/help.txt

# The pages with search, for a browser or any web server: dist/site/index.html. A dead link between pages ends it.
site: $(READY)
	$(PIP) "mkdocs-material>=9.8,<10"
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict --config-file packaging/site/mkdocs.yml

# What is installed in .venv: dist/sbom.json (CycloneDX) and dist/licences.md. The tools have an environment of their own.
sbom: $(READY)
	$(PYTHON) -m venv dist/sbom
	dist/sbom/bin/python -m pip install --disable-pip-version-check --no-input --quiet "cyclonedx-bom>=7,<8" "pip-licenses>=5,<6"
	dist/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o dist/sbom.json $(RUN)
	dist/sbom/bin/pip-licenses --python $(RUN) --format markdown --with-urls --output-file dist/licences.md
	rm -rf dist/sbom

# Needs uv. Writes the lock from the ranges in pyproject.toml.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	  --group dev pyproject.toml --constraints constraints.txt -o requirements.txt

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
