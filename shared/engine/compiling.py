"""Chapter 04. Compilation of the model (torch.compile). Where this machine cannot compile, the run continues without, with a message.

`torch.compile` compiles at the first call, deep in the first step, and fails there with pages of text where no C++ compiler works. So one
small function is compiled first, which tells.
"""

import torch
from rich.console import Console
from torch import nn


def compile_model(model: nn.Module, console: Console) -> None:
    """Run torch.compile on a model in place; where it cannot work on this machine, say why in a sentence and leave the model as it is."""
    if reason := reason_against_compiling(next(model.parameters()).device):
        console.print(
            f"torch.compile does not work here ({reason}): the run goes on without it. Install a C++ compiler (g++), name a working one in "
            "the variable CXX, or set engine.compile to false.", style="yellow", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        return
    model.compile()


def reason_against_compiling(device: torch.device) -> str | None:
    """Why a small function cannot be compiled for this device; None where it can."""
    try:
        torch.compile(lambda x: (x * 2 + 1).sum())(torch.ones(8, device=device))
    except Exception as error:  # of dynamo, of the inductor, or of what it starts
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        return f"{type(cause).__name__}: {lines[0][:200] if lines else 'no reason given'}".rstrip(".")
    return None
