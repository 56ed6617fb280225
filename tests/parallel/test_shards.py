"""Floor 6: pieces of parameters are gathered as they were cut, and an optimizer over them does what it does over the whole."""

from copy import deepcopy

import pytest
import torch
from optim_models import CONFIGS, model_of
from torch import nn

from shared.engine.metrics.gradient_norm import global_gradient_norm
from shared.engine.checkpoint.optimizer_state import name_optimizer_state
from shared.optim.build import build_optimizer
from shared.optim.updater import Update
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.sharding import Cut, Pieces, make_piece, norm_of_parts
from shared.parallel.comm.threads import run_threads

RANGES = {  # of a parameter with 10 numbers
    "uneven": [(0, 4), (4, 7), (7, 10)],
    "one rank has all": [(0, 0), (0, 10), (10, 10)],
    "out of order": [(6, 10), (0, 5), (5, 6)],
    "one rank has none": [(0, 5), (5, 5), (5, 10)],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_what_was_cut_is_gathered_again(ranges, dtype):
    whole = torch.arange(10, dtype=dtype).reshape(2, 5)

    def rank(world):
        cut = Cut((2, 5), ranges, world)
        part = cut.cut(whole)
        return part.numel(), cut.gather(part), world.trace.calls(), world.trace.bytes()

    longest = max(stop - start for start, stop in ranges)
    for place, (numbers, gathered, calls, sizes) in enumerate(run_threads(rank, 3)):
        assert numbers == ranges[place][1] - ranges[place][0]
        assert gathered.dtype == dtype and torch.equal(gathered, whole)
        assert calls == {("all_gather", "world"): 1} and sizes == {("all_gather", "world"): 3 * longest * whole.element_size()}


@pytest.mark.parametrize(
    "ranges", [[(0, 4), (4, 10)], [(0, 4), (4, 7), (7, 9)], [(0, 5), (4, 7), (7, 10)], [(0, 4), (5, 7), (7, 10)], [(1, 4), (4, 7), (7, 10)]]
)
def test_ranges_that_do_not_make_the_whole_are_refused(ranges):
    with pytest.raises(ValueError, match="each of its 10 numbers once"):
        run_threads(lambda world: Cut((2, 5), ranges, world), 3)


def test_a_part_of_a_transposed_whole_is_the_right_one():
    """Newton-Schulz works on the transpose of a tall matrix, so what it returns need not be contiguous."""
    whole = torch.arange(10.0).reshape(2, 5)
    assert torch.equal(Cut((5, 2), [(0, 10)], SingleRankCommunicator()).cut(whole.T), whole.T.flatten())


def cut_evenly(shape, group):
    edges = [shape.numel() * rank // group.size for rank in range(group.size + 1)]
    return Cut(shape, list(zip(edges, edges[1:], strict=False)), group)


def owned(shape, owner, group):
    return Cut(shape, [(0, shape.numel() if rank == owner else 0) for rank in range(group.size)], group)


def pieces_of(model: nn.Module, cuts: dict[str, Cut]) -> Pieces:
    """Pieces that are views into the model's own memory."""
    return Pieces({name: make_piece(cuts[name].cut(p.data), cuts[name], p) for name, p in model.named_parameters()}, cuts)


def hand_gradients(model: nn.Module, pieces: Pieces) -> Pieces:
    """Give each piece its part of the model's gradient; nothing to one of a matrix that another rank holds whole."""
    for name, parameter in model.named_parameters():
        cut, piece = pieces.cuts[name], pieces.pieces[name]
        if cut.is_whole_here or (0, parameter.numel()) not in cut.ranges:
            piece.grad = cut.cut(parameter.grad).view_as(piece).clone()
    return pieces


def with_gradients(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = 10 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def cut_all(model, group, whole_matrices: bool):
    """Every parameter cut evenly; matrices whole on one rank in turn, where asked for."""
    cuts, turn = {}, 0
    for name, parameter in model.named_parameters():
        matrix = whole_matrices and parameter.dim() == 2 and "embedding" not in name and "head" not in name
        cuts[name] = owned(parameter.shape, turn % group.size, group) if matrix else cut_evenly(parameter.shape, group)
        turn += matrix
    return cuts


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("whole_matrices", [False, True], ids=["cut", "whole matrices"])
def test_an_optimizer_over_pieces_does_what_it_does_over_the_model(config, whole_matrices):
    """Two steps with clipping, on 3 ranks of which some hold nothing of a small parameter, against one process."""
    config = deepcopy(config)
    config.newton_schulz_dtype = "float64" if config.name == "muon" else None
    alone = with_gradients(model_of().double())
    start = deepcopy(alone)
    optimizer = build_optimizer(alone, config)
    norms = []
    for _ in range(2):
        with_gradients(alone)
        update = Update(max_norm=1.0)
        update(alone, optimizer, torch.tensor(7))
        norms.append(update.gradient_norm.item())
    expected = name_optimizer_state(alone, optimizer)

    def rank(world):
        model = deepcopy(start)
        pieces = pieces_of(model, cut_all(model, world, whole_matrices))
        optimizer, norms = build_optimizer(pieces, config), []
        for _ in range(2):
            hand_gradients(with_gradients(model), pieces)
            update = Update(max_norm=1.0, norm=Pieces.norm)
            update(pieces, optimizer, torch.tensor(7))
            norms.append(update.gradient_norm.item())
        return pieces, norms, name_optimizer_state(pieces, optimizer)

    for pieces, measured, state in run_threads(rank, 3):
        assert measured == pytest.approx(norms, rel=1e-12)
        assert {tuple(sorted(group["names"])) for group in state.groups} == {tuple(sorted(group["names"])) for group in expected.groups}
        for name, parameter in alone.named_parameters():
            cut = pieces.cuts[name]
            torch.testing.assert_close(pieces.pieces[name].flatten(), cut.cut(parameter.data), rtol=1e-9, atol=1e-12)
            for key, tensor in state.tensors.get(name, {}).items():
                if tensor.dim():
                    torch.testing.assert_close(tensor.flatten(), cut.cut(expected.tensors[name][key]), rtol=1e-9, atol=1e-12)


def test_muon_talks_about_no_matrix_that_a_rank_holds_whole():
    def rank(world):
        model = with_gradients(model_of())
        pieces = pieces_of(model, cut_all(model, world, whole_matrices=True))
        build_optimizer(hand_gradients(model, pieces), CONFIGS["muon"]).step()
        return world.trace.calls()

    assert run_threads(rank, 2) == [{}, {}]


def test_the_norm_counts_parts_once_and_what_all_hold_once():
    """Digits: rank 0 holds 3 of a cut parameter, rank 1 holds 4; both hold 12 of one that is whole everywhere."""

    def rank(world):
        whole, cut = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
        whole.grad = torch.tensor([12.0])
        piece = make_piece(cut.data[world.rank : world.rank + 1], cut_evenly(cut.shape, world), cut)
        piece.grad = torch.tensor([3.0 + world.rank])
        return Pieces({"whole": whole, "cut": piece}, {"cut": piece.sharding}).norm()

    assert [norm.item() for norm in run_threads(rank, 2)] == [13.0, 13.0]


def test_the_norm_is_measured_where_a_rank_has_no_gradient():
    norms = run_threads(lambda world: norm_of_parts([torch.tensor([3.0, 4.0])] if world.rank else [None], world), 3)
    assert [norm.item() for norm in norms] == [50**0.5] * 3
    assert all(norm.dtype == torch.float64 for norm in norms)


def test_a_piece_is_a_view_and_keeps_role_and_frozenness():
    parameter = nn.Parameter(torch.zeros(2, 5), requires_grad=False)
    parameter.role = "expert"
    flat = torch.zeros(10)
    piece = make_piece(flat[4:7], Cut((2, 5), [(4, 7), (0, 4), (7, 10)], FirstOfThree()), parameter)
    piece.data += 1
    assert flat.tolist() == [0.0] * 4 + [1.0] * 3 + [0.0] * 3
    assert piece.role == "expert" and not piece.requires_grad and piece.sharding.shape == (2, 5)


class FirstOfThree(SingleRankCommunicator):
    def __init__(self):
        super().__init__()
        self.size = 3


def test_global_norm_of_one_process_is_that_of_its_pieces():
    model = with_gradients(model_of().double())
    expected = global_gradient_norm(parameter.grad for parameter in model.parameters())
    norms = run_threads(lambda world: hand_gradients(model, pieces_of(model, cut_all(model, world, True))).norm(), 3)
    assert [norm.item() for norm in norms] == pytest.approx([expected.item()] * 3, rel=1e-12)
