"""Where the time of a training step goes, ours beside transformers', in milliseconds by kind of operation.

    python tests/benchmarks/step_profile.py                    LLaMA in float32 and bfloat16
    python tests/benchmarks/step_profile.py --peer gpt2

Every operation that reaches PyTorch's dispatcher is timed, which costs a few microseconds each. On the CPU only: on a GPU operations
return before they are done. Both run in processes that keep freed memory, so page faults are not in the figures.
"""

import argparse
import tempfile
import time
from collections import defaultdict

import torch
from rich.console import Console
from rich.table import Table
from side_by_side import Contender, Round
from step_speed import PEERS, STEPS, prepare_ours, prepare_theirs
from torch.utils._python_dispatch import TorchDispatchMode

from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel

KINDS = {
    "mm": "matrix products", "addmm": "matrix products", "bmm": "matrix products",
    "_scaled_dot_product_flash_attention_for_cpu": "attention kernel",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention kernel",
    "_fused_adamw_": "optimizer", "_to_copy": "casts",
}  # fmt: skip
REST = "everything else"
WARMUP, ROUNDS = 4, 5


class Timing(TorchDispatchMode):
    """Adds up seconds by kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        name = function.name().split("::")[1].split(".")[0]
        self.seconds[KINDS.get(name, REST)] += time.perf_counter() - began
        return result


def profiled(prepare, **options) -> Round:
    one_round = prepare(**options)

    def measured() -> dict[str, float]:
        for _ in range(WARMUP):
            one_round()
        with Timing() as timing:
            for _ in range(ROUNDS):
                one_round()
        return {kind: seconds / (ROUNDS * STEPS) * 1e3 for kind, seconds in timing.seconds.items()}

    return measured


def profile_ours(**options) -> Round:
    return profiled(prepare_ours, **options)


def profile_theirs(**options) -> Round:
    return profiled(prepare_theirs, keep=True, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=PEERS, default="llama")
    peer = parser.parse_args().peer
    table = Table(title=f"{peer}: milliseconds of a step, {torch.get_num_threads()} threads, torch {torch.__version__}")
    kinds = [*dict.fromkeys(KINDS.values()), REST]
    for column in ("", *kinds, "sum"):
        table.add_column(column, justify="right" if column else "left")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(TransformerModel(PEERS[peer]), folder)
        for dtype in ("float32", "bfloat16"):
            for who, prepare in (("ours", profile_ours), ("transformers", profile_theirs)):
                contender = Contender(prepare, folder=folder, device="cpu", dtype=dtype)
                found = contender.round()
                contender.close()
                table.add_row(f"{who}, {dtype}", *(f"{found.get(kind, 0):.0f}" for kind in kinds), f"{sum(found.values()):.0f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
