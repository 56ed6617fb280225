# The course's commands. Each one first makes what is missing: the environment in .venv and the packages in it.
#
#   make run                   train a small LLaMA with the trainer, on whatever hardware there is, and write a report
#   make run IMPL=mine         ... with your own exercises (mixed: yours where their check passed; otherwise as the file says)
#   make run CONFIG=my.yaml ARGS="steps=500 optimizer.lr=0.002"    ... as that file and those words say; ARGS=--help lists all
#   make run LAYOUT=dp2        ... on two processes: dp2, fsdp2, dp2_zero1, tp2, pp2, ... (pp2_dp2: four) BACKEND=torch on PyTorch's own
#   make run MODE=sft          fine-tune that model on conversations; ARGS="adapter.rank=16" trains an adapter (course chat RUN talks to it)
#   make run MODE=dpo          ... then learn from pairs which answers are preferred; MODE=reward trains a reward model, MODE=ppo against it
#   make run MODE=grpo         ... then let it teach itself: it tries tasks that a program checks
#   make run PIPELINE=laptop   all of it: pretraining, fine-tuning, DPO and GRPO, one from the other, with one report (PIPELINE=my.yaml)
#   make run CHAPTER=01        a chapter's own run script; its options are ARGS="--steps 500 --data my_texts", ARGS=--help
#   make lab                   JupyterLab on the first chapter; make lab CHAPTER=02 on that one
#   make check                 whether everything that you will run works here, in three minutes
#   make test                  what must hold before every commit
#   make test CHANGED=1        what the files concern that git calls changed; BASE=main: that differ from that commit
#   make test CHAPTER=06       one chapter's part of it: its floor, its comparisons with other libraries, its checks, its notebook
#   make test-all              also what takes longer: other rounding and thread counts, other examples, mutation of the solutions
#   make gpu                   checks and timings on an NVIDIA GPU, in slices that resume; ARGS=--list, ARGS="--slice attention"
#   make install               the environment alone, with what `make run` needs; GROUP=pretrained adds a real model, lab, trackers,
#                              builds, scaling, check or test other packages
#   make clean                 remove the environment and what runs left behind
#
# PYTHON=python3.13            which Python makes the environment (3.11 to 3.14; default: the first that is found)
# TORCH_INDEX=ADDRESS          where to take PyTorch from, for its smaller build without CUDA: see the README

CONFIG  ?= chapters/12_grpo/laptop$(if $(filter-out pretrain,$(MODE)),_$(MODE)).yaml
CHAIN    = $(if $(filter %.yaml %.yml,$(PIPELINE)),$(PIPELINE),chapters/12_grpo/pipelines/$(PIPELINE).yaml)
ARGS    ?=
WORDS    = $(strip $(if $(IMPL),impl=$(IMPL)) $(if $(BACKEND),parallel.backend=$(BACKEND)) $(ARGS))
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/ready
LAB     := $(VENV)/ready-lab
TESTS   := $(VENV)/ready-test
CHECKS  := $(VENV)/ready-check
GROUPED := $(LAB) $(VENV)/ready-trackers $(VENV)/ready-builds $(VENV)/ready-scaling $(VENV)/ready-pretrained $(CHECKS) $(TESTS)
SCRIPT   = $(firstword $(wildcard chapters/$(CHAPTER)*/run.py))
CHOSEN   = $(if $(CHAPTER),--chapter $(CHAPTER)) $(if $(BASE)$(CHANGED),--changed $(or $(BASE),HEAD))
# One worker more than there are cores: tests also wait, for processes that they have started.
WORKERS  = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
SUITE    = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --max-worker-restart 0 --no-loadscope-reorder
NOTEBOOK = $(firstword $(wildcard notebooks/$(or $(CHAPTER),01)*.ipynb))

.PHONY: run lab check test test-all gpu install clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

run: $(READY)
ifdef CHAPTER
	@test -n "$(SCRIPT)" || { echo "There is no chapter $(CHAPTER) with a run script. There are: $(wildcard chapters/*/run.py)"; exit 2; }
	@$(BIN)/python $(SCRIPT) $(if $(IMPL),--impl $(IMPL)) $(ARGS)
else ifdef PIPELINE
	@$(BIN)/python -m shared.trainer.pipeline.chain $(CHAIN) $(if $(LAYOUT),layout=$(LAYOUT)) $(WORDS)
else ifdef LAYOUT
	@$(BIN)/python -m shared.trainer.launch.start $(LAYOUT) $(CONFIG) $(WORDS)
else
	@$(BIN)/python chapters/12_grpo/train.py $(CONFIG) $(WORDS)
endif

lab: $(LAB)
	@test -n "$(NOTEBOOK)" || { echo "There is no notebook of chapter $(CHAPTER). There are: $(wildcard notebooks/*.ipynb)"; exit 2; }
	@$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.app_settings_dir="$(CURDIR)/.ci/lab" \
	    --LabApp.default_url=/lab/tree/$(NOTEBOOK) $(ARGS)

check: $(CHECKS)
	@$(BIN)/course doctor
	@$(SUITE) -n logical -q -m check $$(grep -rlE "mark\.check\b" tests --include="test_*.py") $(ARGS)
	@echo "It works here: every exercise's and every build's solution, a chapter's run, a notebook, two ranks, and input that cannot be right."
	@echo "\`make test\` adds what CI runs: comparisons with other libraries, wrong answers to every exercise, and every layout and mode."

test: $(TESTS)
	@$(SUITE) -m "not slow" $(CHOSEN) $(ARGS)

test-all: $(TESTS)
	@$(BIN)/python -m pytest --hypothesis-profile=other_examples $(ARGS)

gpu: $(TESTS)
	@$(BIN)/python tests/gpu/run.py $(ARGS)

install: $(if $(GROUP),$(VENV)/ready-$(GROUP),$(READY))

# Each group of packages that pyproject.toml names has a file that says since when it is there; that of the tests holds the others.
$(READY) $(GROUPED): pyproject.toml
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh .ci/install.sh $(VENV) $(patsubst ready-%,%,$(filter ready-%,$(notdir $@)))
	@touch $@ $(READY) $(if $(filter $(TESTS),$@),$(GROUPED))

clean:
	rm -rf $(VENV) runs .pytest_cache .hypothesis
