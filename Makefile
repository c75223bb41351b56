# make demo | test | check | docs | dist | bench | clean. Needs python3 (3.11 or newer), make and a C++
# compiler; the rest is installed into .venv, at the versions of constraints.txt.

PYTHON ?= python3
NPROC  ?= 2
TESTERS ?= 2

VENV := .venv
BIN  := $(VENV)/bin
DONE := $(VENV)/.installed
PIP  := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# What torchtitan's models import; it asks for more, such as clients of web services.
FRAMEWORKS := torchtitan spmd_types tyro docstring_parser

.PHONY: help demo test test-torch test-integrations test-models check docs dist bench contract docs-figures clean
help:
	@echo "make demo    eager FSDP2 and graphshard: a small model on $(NPROC) processes, and on a slow link"
	@echo "make test    run the test suite"
	@echo "make test-torch TORCH=2.15.0  private names, parity and the contract with another torch"
	@echo "make test-integrations  accelerate, Trainer, TRL, Lightning, Ray, ...: docs/integrations, with the real packages"
	@echo "make test-models  architectures of transformers and diffusers: docs/architectures.md"
	@echo "make check   ruff, mypy --strict, import-linter, schemas of .github"
	@echo "make docs    the pages of docs/ as a site, in build/docs; a broken link is an error"
	@echo "make dist    source distribution and wheel, in dist; TAG=vX.Y.Z: of that version"
	@echo "make bench   time a training step on an emulated network, graphshard against FSDP2"
	@echo "make contract write docs/fsdp2-contract.md from the results of its tests"
	@echo "make docs-figures write the screens, tables and pictures of README.md and docs/"
	@echo "make clean   remove .venv and everything that make writes"

demo: $(DONE)
	$(BIN)/python examples/demo.py --processes $(NPROC)

# Each tester starts its own ranks, and takes whole files, in the order of tests/conftest.py. Some
# hundred processes read the sources: they are compiled once. The viewer's tests drive a real browser.
test test-torch: export PYTHONDONTWRITEBYTECODE =
test test-torch: TAKE := -n $(TESTERS) --dist loadfile --no-loadscope-reorder
test: $(DONE)
	@command -v chromium >/dev/null || echo "no chromium: the tests of the viewer in a browser are" \
		"skipped; to run them: apt-get install chromium fonts-dejavu-core" >&2
	$(BIN)/python -m pytest $(TAKE) $(PYTEST_ARGS)

# Another torch, with CUDA's libraries 5 GB, goes into a venv of its own.
OTHER := .venv-torch-$(TORCH)
OTHER_PIP := $(OTHER)/bin/python -m pip --disable-pip-version-check install --quiet --no-cache-dir
test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest $(TAKE) tests/test_torch_names.py \
		tests/dist/test_parity.py tests/dist/test_contract.py $(PYTEST_ARGS)

$(OTHER)/.installed: pyproject.toml constraints.txt
	@test -n "$(TORCH)" || { echo "error: which torch? make test-torch TORCH=2.15.0" >&2; exit 1; }
	@echo "installing torch $(TORCH) into $(OTHER) (a few minutes)"
	$(PYTHON) -m venv $(OTHER)
	grep -v -E '^(torch|setuptools)==' constraints.txt >$(OTHER)/constraints.txt
	$(OTHER_PIP) torch==$(TORCH)
	$(OTHER_PIP) -c $(OTHER)/constraints.txt 'setuptools>=77.0.3,<82'
	$(OTHER_PIP) -c $(OTHER)/constraints.txt --no-build-isolation -e '.[cli,dev]'
	@touch $@

# Frameworks, and libraries of models, are in environments of their own, on top of the other one's
# packages.
WITH := .venv-integrations
test-integrations: $(WITH)/.installed
	$(WITH)/bin/python -m pytest tests/integrations $(PYTEST_ARGS)

ZOO := .venv-models
test-models: $(ZOO)/.installed
	GRAPHSHARD_MODELS="$(MODELS)" $(ZOO)/bin/python -m pytest tests/architectures $(PYTEST_ARGS)

$(WITH)/.installed: constraints-integrations.txt
$(WITH)/.installed $(ZOO)/.installed: .venv-%/.installed: $(DONE) constraints-models.txt
	$(PYTHON) -m venv --clear .venv-$*
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r constraints-$*.txt
	@touch $@

# Schemas come with the tool.
SCHEMA := $(BIN)/check-jsonschema --quiet --builtin-schema vendor.
check: $(DONE)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports
	$(SCHEMA)github-workflows .github/workflows/*.yml
	$(SCHEMA)github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	$(SCHEMA)github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA)citation-file-format CITATION.cff

# Everything anew: what only some pages mention would stay as it was. The pages load nothing from
# another host.
docs: $(DONE)
	rm -rf build/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@! grep -rnE '<(script|img|link|iframe)[^>]* (src|href)="(https?:)?//' build/docs --include=*.html
	@! grep -rnE '(url\(|@import )["'"'"']?(https?:)?//' build/docs --include=*.css
	@echo "build/docs/index.html"

# The wheel is made of the source distribution, in an environment that has what it takes.
dist: $(DONE)
	$(BIN)/python .ci/version.py $(TAG)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

# torch goes first, alone, at the version of constraints.txt, so that an index without it fails
# here. Without build isolation, the build too uses the pinned setuptools.
$(DONE): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		command -v $(PYTHON) >/dev/null || { \
			echo "error: $(PYTHON) not found; graphshard needs Python 3.11 or newer" >&2; exit 1; }; \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
			echo "error: graphshard needs Python 3.11 or newer, and $(PYTHON) is" \
				"$$($(PYTHON) -V 2>&1); name another with: make PYTHON=python3.11" >&2; exit 1; }; \
		echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation -e '.[cli,dev,docs]'
	$(PIP) --no-deps $(FRAMEWORKS)
	@touch $@

bench: $(DONE)
	$(BIN)/python bench/step.py --config XS --gbit 1.4 --launches 2 --steps 4 \
		--modes fsdp2_tuned,fsdp2_tuned_keep,planned_low,planned_middle,planned

contract: $(DONE)
	GRAPHSHARD_WRITE_FIGURES=1 $(BIN)/python -m pytest tests/dist/test_contract.py

# PAGES: of these alone, and no pictures. RECORDED=1: what depends on the clock is run again, too.
docs-figures: $(DONE)
	$(BIN)/python bench/figures.py $(if $(RECORDED),--recorded) $(PAGES)

clean:
	rm -rf $(VENV) .venv-torch-* $(WITH) $(ZOO) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		.import_linter_cache out schedule.html schedule.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
