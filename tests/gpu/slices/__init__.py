"""The slices: one module each, with `run(machine, small)`, which yields rows. A later chapter adds a module and its name here.

A module's first sentence says what it shows. `ENVIRONMENT`, where it has one, is set for its process before PyTorch is imported.
"""

import ast
from pathlib import Path

SLICES = (  # in the order of what users need
    "trainer", "memory", "speed", "nccl", "step", "attention", "compile", "checkpoints", "loading", "offload", "muon", "tensor",
)  # fmt: skip
FOLDER = Path(__file__).parent


def sentence_of(name: str) -> str:
    """The first sentence of a slice's docstring."""
    return ast.get_docstring(parsed(name)).split("\n\n")[0].replace("\n", " ")


def environment_of(name: str) -> dict[str, str]:
    """What a slice's process needs in its environment before PyTorch starts CUDA."""
    for node in parsed(name).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ENVIRONMENT":
            return ast.literal_eval(node.value)
    return {}


def parsed(name: str) -> ast.Module:
    """A slice's source, which is not imported: that is its own process's to try."""
    return ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
