# The course's commands. Each one first makes what is missing: the environment in .venv and the packages in it.
#
#   make run                   train the newest model that the chapters have built, on whatever hardware there is
#   make run IMPL=mine         ... with your own exercises (mixed: yours where their check passed)
#   make run CHAPTER=01        ... with that chapter's run script
#   make run ARGS="--steps 500 --data my_texts"     options of the run script; ARGS=--help lists them
#   make lab                   JupyterLab on the first chapter
#   make test                  what must hold before every commit
#   make test-all              also what takes longer: other rounding and thread counts, mutation of the solutions
#   make install               the environment alone
#   make clean                 remove the environment and what runs left behind
#
# PYTHON=python3.12            which Python makes the environment (3.11 or 3.12; default: the first that is found)
# TORCH_INDEX=ADDRESS          where to take PyTorch from, for its smaller build without CUDA: see the README

CHAPTER ?= $(patsubst chapters/%/run.py,%,$(lastword $(sort $(wildcard chapters/*/run.py))))
IMPL    ?= reference
ARGS    ?=
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/ready
SCRIPT   = $(firstword $(wildcard chapters/$(CHAPTER)*/run.py))

.PHONY: run lab test test-all install clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

run: $(READY)
	@test -n "$(SCRIPT)" || { echo "There is no chapter $(CHAPTER) with a run script. There are: $(wildcard chapters/*/run.py)"; exit 2; }
	@$(BIN)/python $(SCRIPT) --impl $(IMPL) $(ARGS)

lab: $(READY)
	@$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/01_training_loop.ipynb $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(READY)
	@$(BIN)/python -m pytest $(ARGS)

install: $(READY)

$(READY): pyproject.toml
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh .ci/install.sh $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .hypothesis
