# make demo   environment if missing, then a three-minute int8 RL run with its before and after
# make test   environment if missing, then every test, real vLLM included
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Extra arguments for pip, e.g. the index of PyTorch's CPU wheels where pip does not find them by itself.
PIP_ARGS ?=

.PHONY: demo test lint clean
demo: $(VENV)/.ready
	@rm -rf runs/demo
	$(BIN)/trueup train configs/demo.yaml --out runs/demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q tests

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts

$(VENV)/.ready: pyproject.toml scripts/mend_torchvision.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "no virtual environment: install Python 3.11 or newer with its venv module (Debian: apt install python3-venv)"; exit 1; }
	@echo "installing into $(VENV): about 4 GB, two to four minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[cpu,test]'
	$(BIN)/python scripts/mend_torchvision.py
	@touch $@

clean:
	rm -rf $(VENV) runs build .pytest_cache .ruff_cache .hypothesis
