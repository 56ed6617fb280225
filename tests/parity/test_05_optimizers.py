"""Chapter 05 beside implementations that nobody here wrote: torch.optim, lion_pytorch, torch.amp, transformers, and the SVD.

Each comparison has a negative control: with one rule broken on purpose it must fail. Tolerances: 1e-12 in float64, where only the
order of rounding differs; Muon orthogonalises in bfloat16, whose last digit is 2^-8 of entries below 1, and three steps of 0.02 make
of that less than 2e-3.
"""

import threading

import lion_pytorch
import pytest
import torch
from float_tensors import largest_difference, randn
from torch import nn

from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.muon import newton_schulz
from shared.optim.optimizer import GroupedOptimizer

SHAPES = ((11, 5), (5, 11), (7,), (3, 7, 5))
ADAMW = {"lr": 0.01, "betas": (0.9, 0.97), "eps": 1e-8, "weight_decay": 0.2}


def weights(dtype=torch.float64, shapes=SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(randn(*shape, seed=seed, dtype=dtype)) for seed, shape in enumerate(shapes)]


def stepped(make_optimizer, steps: int, dtype=torch.float64, shapes=SHAPES):
    """The weights after some steps of random gradients, one of which is missing every other step, and the optimizer."""
    parameters = weights(dtype, shapes)
    optimizer = make_optimizer(parameters)
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            absent = index == 2 and step % 2
            parameter.grad = None if absent else randn(*parameter.shape, seed=100 * step + index, dtype=dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer


def ours(rule: str, **settings):
    return lambda parameters: GroupedOptimizer([{"params": parameters, "rule": rule, **settings}])


@pytest.mark.parametrize("fused", [False, True], ids=["our function", "the fused kernel"])
def test_adamw_is_torchs(fused):
    mine, optimizer = stepped(ours("adamw", **ADAMW, fused=fused), 7)
    theirs, oracle = stepped(lambda parameters: torch.optim.AdamW(parameters, **ADAMW, foreach=False), 7)
    assert largest_difference(mine, theirs) < 1e-12
    for own, other in zip(optimizer.state.values(), oracle.state.values(), strict=True):
        assert own.keys() == other.keys(), "the state has torch's names, so either loads the other's"
        assert all(torch.allclose(own[key], other[key], rtol=1e-12, atol=1e-15) for key in own)


def test_adamw_is_not_adam_with_a_penalty():
    mine, _ = stepped(ours("adamw", **ADAMW, fused=False), 7)
    adam, _ = stepped(lambda parameters: torch.optim.Adam(parameters, **ADAMW), 7)
    assert largest_difference(mine, adam) > 1e-2


def test_sgd_is_torchs_with_the_decay_taken_out():
    settings = {"lr": 0.05, "momentum": 0.9}
    mine, _ = stepped(ours("sgd", **settings, weight_decay=0.0), 7)
    theirs, _ = stepped(lambda parameters: torch.optim.SGD(parameters, **settings), 7)
    decayed, _ = stepped(ours("sgd", **settings, weight_decay=0.5), 7)
    assert largest_difference(mine, theirs) < 1e-12 < 1e-2 < largest_difference(decayed, theirs)


def test_lion_is_lion_pytorchs():
    settings = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.3}
    mine, _ = stepped(ours("lion", **settings), 9)
    theirs, _ = stepped(lambda parameters: lion_pytorch.Lion(parameters, **settings), 9)
    swapped, _ = stepped(ours("lion", **settings | {"betas": (0.98, 0.9)}), 9)
    assert largest_difference(mine, theirs) < 1e-13 < 1e-2 < largest_difference(swapped, theirs)


MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
MATRICES = ((11, 5), (5, 11), (7, 7), (11, 5))  # two of one shape: orthogonalised together


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(scaling, dtype, nesterov):
    settings = MUON | {"nesterov": nesterov}
    mine, optimizer = stepped(ours("muon", **settings, scaling=scaling, steps=5, dtype=dtype), 3, torch.float32, MATRICES)
    adjust = None if scaling == "original" else scaling
    theirs, oracle = stepped(lambda parameters: torch.optim.Muon(parameters, **settings, adjust_lr_fn=adjust), 3, torch.float32, MATRICES)
    assert largest_difference(mine, theirs) < 2e-3
    if dtype == "bfloat16":
        buffers = ([of.state[parameter]["momentum_buffer"] for parameter in of.param_groups[0]["params"]] for of in (optimizer, oracle))
        assert largest_difference(*buffers) < 1e-6


@pytest.mark.parametrize("broken", [{"momentum": 0.5}, {"scaling": "match_rms_adamw"}, {"steps": 1}, {"nesterov": False}])
def test_a_muon_with_one_rule_broken_is_not_torchs(broken):
    settings = MUON | {"nesterov": True, "scaling": "original", "steps": 5, "dtype": "float64"} | broken
    mine, _ = stepped(ours("muon", **settings), 3, torch.float32, MATRICES)
    theirs, _ = stepped(lambda parameters: torch.optim.Muon(parameters, **MUON, nesterov=True), 3, torch.float32, MATRICES)
    assert largest_difference(mine, theirs) > 4e-3


# Newton-Schulz and the singular value decomposition.


@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 192), (5, 32, 48)])
def test_singular_values_end_near_one(shape):
    """Random matrices: a handful of their singular values is close to 0, and those stay below; all others land in [0.68, 1.13]."""
    matrices = randn(*shape, seed=1)
    before = torch.linalg.svdvals(matrices / torch.linalg.matrix_norm(matrices, keepdim=True))
    values = torch.linalg.svdvals(newton_schulz(matrices))[before > 0.01]
    assert 0.67 < values.min() and values.max() < 1.21
    assert torch.linalg.svdvals(newton_schulz(matrices, steps=1))[before > 0.01].min() < 0.3, "one step is not enough"


def test_the_classic_coefficients_reach_the_nearest_orthogonal_matrix():
    matrix = randn(7, 11, seed=1)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert (newton_schulz(matrix, steps=40, coefficients=(1.5, -0.5, 0.0)) - left @ right).abs().max() < 1e-12
    assert (newton_schulz(matrix, steps=2, coefficients=(1.5, -0.5, 0.0)) - left @ right).abs().max() > 1e-2


def test_a_part_of_a_matrix_has_another_orthogonalisation():
    matrix = randn(64, 64, seed=1)
    by_parts = torch.cat([newton_schulz(part) for part in matrix.chunk(2)])
    assert (by_parts - newton_schulz(matrix)).abs().max() > 0.1


class Threads:
    """Two threads that hold the rows of a matrix; each gathers by waiting for the other."""

    needs_gathering = True

    def __init__(self, shape, rank: int, board: list, barrier: threading.Barrier):
        self.shape, self.rank, self.board, self.barrier = torch.Size(shape), rank, board, barrier

    def gather(self, part):
        self.board[self.rank] = part
        self.barrier.wait()
        whole = torch.cat(self.board)
        self.barrier.wait()
        return whole

    def local(self, whole):
        return whole.chunk(2)[self.rank]


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "each part alone"])
def test_a_matrix_that_is_cut_steps_like_the_whole_one(gathers):
    """Rows on two ranks, the whole gathered before it is orthogonalised: the same weights to rounding. Without, another step."""
    settings = MUON | {"nesterov": True, "scaling": "original", "steps": 5, "dtype": "float64"}
    whole, _ = stepped(ours("muon", **settings), 3, shapes=((22, 5),))
    board, barrier, results = [None, None], threading.Barrier(2), [None, None]

    def rank(number: int) -> None:
        part = nn.Parameter(randn(22, 5, seed=0).chunk(2)[number].clone())
        if gathers:
            part.sharding = Threads((22, 5), number, board, barrier)
        optimizer = ours("muon", **settings)([part])
        for step in range(3):
            part.grad = randn(22, 5, seed=100 * step).chunk(2)[number].clone()
            optimizer.step()
        results[number] = part.detach()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    difference = (torch.cat(results) - whole[0]).abs().max().item()
    assert difference < 1e-12 if gathers else difference > 1e-2


def test_a_model_built_for_muon_updates_like_torchs_two_optimizers():
    """One object over a whole transformer beside torch.optim.Muon for its matrices and AdamW for the rest, with the same decay."""
    from shared.model.config import ModelConfig
    from shared.model.roles import parameters_by_role
    from shared.model.transformer import TransformerModel

    def built():
        return TransformerModel(
            ModelConfig(vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.1),
        )

    model, oracle = built(), built()
    mine = build_optimizer(model, OptimizerConfig("muon", lr=0.01, weight_decay=0.1))
    roles = parameters_by_role(oracle)
    rest = [(roles["embedding"], 0.1), (roles["norm"], 0.0), (roles["bias"], 0.0)]
    theirs = [
        torch.optim.Muon(roles["matrix"].values(), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": [*named.values()], "weight_decay": decay} for named, decay in rest if named], lr=0.01, betas=(0.9, 0.95),
        ),
    ]
    for step in range(3):
        for index, (one, other) in enumerate(zip(model.parameters(), oracle.parameters(), strict=True)):
            one.grad = randn(*one.shape, seed=1000 * step + index, dtype=torch.float32)
            other.grad = one.grad.clone()
        mine.step(), [optimizer.step() for optimizer in theirs]
    assert largest_difference(model.parameters(), oracle.parameters()) < 2e-3
    untouched = built()
    assert min((a - b).abs().max().item() for a, b in zip(model.parameters(), untouched.parameters(), strict=True)) > 4e-3
