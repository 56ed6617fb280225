"""A learner's whole build in chapter 02's run: their LLaMA, trained by the same loop on the same text.

`run.py` takes this way with `--impl mine` (or `mixed`) where every stage of the build has passed and the model is a LLaMA.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from chapters.text_run import run_on_text
from shared.course.build_check import Functions
from shared.course.errors import CourseError
from shared.model.config import ModelConfig
from shared.model.hf.registry import write_config


class BuiltModel(nn.Module):
    """A build's model as the loop calls one: ids [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, build: Functions, config: dict[str, Any], seed: int):
        super().__init__()
        self.built, self.build = build.create(config, seed), build

    def forward(self, ids: Tensor) -> Tensor:
        return self.build.logits(self.built, ids)


def llama_config(model: ModelConfig) -> dict[str, Any] | None:
    """The model as LLaMA's config.json, which is what a build reads; None where it is no LLaMA."""
    try:
        return write_config(model, "llama")[1]
    except CourseError:
        return None


def run_build(config: Any, build: Functions, llama: dict[str, Any]) -> None:
    """Train the build's model as `config` says. It is on the CPU, for which the build is written."""
    run_on_text(replace(config, device="cpu"), lambda: BuiltModel(build, llama, config.seed), config.seq)
