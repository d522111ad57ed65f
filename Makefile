# Short targets; what they do is in the scripts they call.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-all test-megatron test-versions test-gpu-stack patches-apply patches-check patches-refresh \
  recipes-check recipes-smoke engines lint format bench study study-screen study-gradients study-verl study-quick study-null study-map \
  doctor lock clean

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 16

setup:  ## a virtual environment with everything pinned
	@bash requirements/system.sh & system=$$!; bash requirements/install.sh $(VENV) && wait $$system

demo: setup  ## train on the CPU under three aggregations and compare  [ARMS=all MODEL=path STEPS=n SEED=n RESUME=1]
	@$(PY) -m recipes.demo.run $(if $(ARMS),--arms $(ARMS)) $(if $(MODEL),--model $(MODEL)) \
	  $(if $(STEPS),--steps $(STEPS)) $(if $(SEED),--seed $(SEED)) $(if $(RESUME),--resume)

# Three at a time on two cores: the first begins with the runs of the real trainer, which wait a fifth of their time.
test: setup  ## the tests, with one run of verl's real trainer of each kind
	@$(PY) -m pytest -n 3 --dist worksteal -m "not deep"

test-fast: setup  ## the tests that take no time, two at a time
	@$(PY) -m pytest -n 2 --dist worksteal -m "not trainer and not slow and not deep"

test-all: setup  ## every test, with what `test` leaves out: more runs of verl's trainers, more batches (an hour)
	@$(PY) -m pytest -n 2 --dist worksteal -m "not trainer"
	@$(PY) -m pytest -m trainer

test-megatron: setup  ## verl's Megatron engine on CPU ranks, in an environment of its own, .venv-megatron
	@bash requirements/megatron.sh $(VENV) .venv-megatron
	@OMP_NUM_THREADS=1 .venv-megatron/bin/python -m pytest tests/engines/test_megatron.py

engines: setup  ## the tables of docs/engines.md: every engine and layout that runs on the CPU, against float64
	@OMP_NUM_THREADS=1 $(PY) -m dev.engines
	@bash requirements/megatron.sh $(VENV) .venv-megatron
	@OMP_NUM_THREADS=1 .venv-megatron/bin/python -m dev.engines megatron

test-versions: setup  ## the contract with every supported release of verl, as a table (downloads each once)
	@$(PY) -m dev.versions

test-gpu-stack:  ## the GPU stack's own versions on this CPU: does it attach, tests of hooks and policy losses (10 GB)
	@bash requirements/gpu/stack.sh

patches-apply: setup  ## the modes inside a verl of your own, instead of the plugin: VERL=package or checkout
	@$(PY) -m patches.patches apply $(VERL)

patches-check: setup  ## every release from PyPI: apply, re-export, verl's and our tests  [ONLY=releases BATCHES=n]
	@$(PY) -m patches.patches check $(ONLY) $(if $(BATCHES),--batches $(BATCHES))

patches-refresh: setup  ## write the patches anew, with fuzz; or from the last commits of a tree  [TREE=path]
	@$(PY) -m patches.patches refresh $(if $(TREE),--tree $(TREE))

recipes-check: setup  ## compose every recipe, arm and cluster; give them to verl's classes; compare (in `make test`)
	@$(PY) -m pytest tests/paper/test_recipes.py

recipes-smoke: setup  ## two real steps of every recipe and arm on the CPU, a resumed run, an evaluation  [ONLY=text]
	@$(PY) -m recipes.smoke $(if $(ONLY),--only "$(ONLY)")

lint: setup  ## ruff, pyright, shellcheck
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright && $(BIN)/shellcheck recipes/*.sh recipes/*.sbatch requirements/*.sh requirements/gpu/*.sh .ci/run

format: setup  ## ruff's formatting and fixes
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: setup  ## cost of the aggregation against verl's token-mean, and of a million pool lengths
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.aggregation

study: setup  ## the confirmation of studies/miniature, and the report; resumes
	@$(PY) -m studies.miniature confirm && $(PY) -m studies.report

study-screen: setup  ## its screening: every rule, four cells, four seeds; resumes
	@$(PY) -m studies.miniature screen && $(PY) -m studies.report

study-verl: setup  ## two of its cells in verl's own trainer, against the loop; resumes
	@$(PY) -m studies.in_verl && $(PY) -m studies.report

study-gradients: setup  ## which rule's gradient points where the reward is, and its trainings; resumes  [SEEDS=n]
	@OMP_NUM_THREADS=1 $(PY) -m studies.gradient_quality gradients && \
	  OMP_NUM_THREADS=1 $(PY) -m studies.gradient_quality trainings $(if $(SEEDS),--seeds $(SEEDS)) && $(PY) -m studies.report

study-quick: setup  ## a few short runs of it
	@$(PY) -m studies.miniature quick

study-null: setup  ## push on length of every rule where length and correctness are independent (a minute and a half)
	@OMP_NUM_THREADS=1 $(PY) -m studies.null_length_bias

study-map: setup  ## where a rule's bias stands out of the noise, or a run's place there (two minutes)  [REPORT=analyze.json]
	@OMP_NUM_THREADS=1 $(PY) -m studies.scale $(if $(REPORT),--from $(REPORT))

doctor: setup  ## what is installed, and does it attach
	@$(BIN)/verl-ba doctor

lock: setup  ## write requirements/lock.txt from the environment
	@bash requirements/lock.sh $(VENV)

clean:  ## results and caches; the environment stays
	@rm -rf results .cache .pytest_cache .ruff_cache .hypothesis
