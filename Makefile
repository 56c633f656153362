# make demo   environment if missing, then a three-minute int8 RL run with its before and after
# make test   environment if missing, then every test, real vLLM included
# make study-quick   a small study, fifteen minutes: eight runs and the page about them
# make peers  in an environment of its own: our corrections against the peers' own code
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Extra arguments for pip, e.g. the index of PyTorch's CPU wheels where pip does not find them by itself.
PIP_ARGS ?=

.PHONY: demo test lint study-quick peers clean
demo: $(VENV)/.ready
	@rm -rf runs/demo
	$(BIN)/trueup train configs/demo.yaml --out runs/demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q tests

study-quick: $(VENV)/.ready
	$(BIN)/trueup study configs/studies/quick.yaml --out runs/study-quick

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests scripts bench
	$(BIN)/ruff format --check src tests scripts bench

peers: bench/peers/.venv/.ready
	PYTHONPATH=src bench/peers/.venv/bin/python bench/peers/compare.py

bench/peers/.venv/.ready: bench/peers/requirements.txt
	@test -x bench/peers/.venv/bin/python || $(PYTHON) -m venv bench/peers/.venv
	bench/peers/.venv/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r bench/peers/requirements.txt
	bench/peers/.venv/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps verl==0.9.1
	@touch $@

$(VENV)/.ready: pyproject.toml scripts/mend_torchvision.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "no virtual environment: install Python 3.11 or newer with its venv module (Debian: apt install python3-venv)"; exit 1; }
	@echo "installing into $(VENV): about 4 GB, two to four minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[cpu,test]'
	$(BIN)/python scripts/mend_torchvision.py
	@touch $@

clean:
	rm -rf $(VENV) bench/peers/.venv runs build .pytest_cache .ruff_cache .hypothesis
