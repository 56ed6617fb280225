"""Muon under tensor parallelism, in bytes: each matrix gathered on every rank, or orthogonalised by one rank of the group and sent back.

python chapters/07_tensor_parallel/muon_exchange.py

The core gathers (`shared.optim.muon.orthogonalized`). The other way is an all-to-all: rank i gets matrix i of each n, all of it, and sends
every rank its slice of the result. Both ways give the same numbers, which is asserted, and what they send is counted by the trace.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from shared.model.config import ModelConfig  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.optim.muon import newton_schulz, orthogonalized  # noqa: E402
from shared.parallel.comm.communicator import Communicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.config import ParallelConfig  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.planning.costs import cost_of_entries  # noqa: E402
from shared.parallel.tensor.axis import TensorParallel  # noqa: E402

CONFIG = ModelConfig(vocab_size=64, hidden_size=64, num_hidden_layers=8, num_attention_heads=8, intermediate_size=192)


def gathered(parts: list[Tensor], group: Communicator) -> list[Tensor]:
    """Every rank gathers every matrix, and orthogonalises all of them."""
    return [orthogonalized(part.unsqueeze(0), part.sharding, 5, torch.float32)[0] for part in parts]


def by_one_rank_each(parts: list[Tensor], group: Communicator) -> list[Tensor]:
    """Of each n matrices of one shape, rank i gets matrix i and sends its slices back."""
    results = []
    for first in range(0, len(parts), group.size):
        batch = parts[first : first + group.size]
        sharding = batch[0].sharding
        arrived = [batch[0].new_empty(box.shape) for box in sharding.parts]
        group.all_to_all(arrived, [part.detach().contiguous() for part in batch])
        whole = batch[0].new_empty(sharding.shape)
        for box, slice_of_rank in zip(sharding.parts, arrived, strict=True):
            box.of(whole).copy_(slice_of_rank)
        whole = newton_schulz(whole, 5)
        returned = [torch.empty_like(part) for part in batch]
        group.all_to_all(returned, [box.of(whole).contiguous() for box in sharding.parts])
        results += returned
    return results


def measure(world: Communicator) -> dict[str, tuple[float, int]]:
    """Way -> bytes that a rank sends for all matrices of the blocks, and how many it orthogonalises."""
    model = TransformerModel(CONFIG)
    TensorParallel().shape(model, Mesh(ParallelConfig(tensor_parallel=world.size), world))
    by_kind: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            by_kind.setdefault(name.split(".")[-2], []).append(parameter)
    told, found, matrices = {}, {}, sum(map(len, by_kind.values()))
    for way, each in ((gathered, matrices), (by_one_rank_each, matrices // world.size)):
        world.trace.clear()
        found[way] = [update for parts in by_kind.values() for update in way(parts, world)]
        told[way.__name__] = cost_of_entries(world.trace.entries).bytes, each
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    return told


def table() -> list[str]:
    lines = ["| ranks | gathered: a rank sends, orthogonalises | by one rank each: sends, orthogonalises |", "|---|---|---|"]
    for ranks in (2, 4, 8):
        told = run_threads(measure, ranks)[0]
        lines.append(f"| {ranks} | " + " | ".join(f"{sent / 1e6:.2f} MB, {each}" for sent, each in told.values()) + " |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
