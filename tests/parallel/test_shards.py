"""Floor 6: sharding as a fact on parameters. Shards are gathered as they were cut, regions are read as boxes, and an optimizer over shards
does what it does over the whole."""

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
from shared.parallel.data.engine import DataEngine, Parameters
from shared.parallel.config import ParallelConfig
from shared.parallel.held import placement
from shared.parallel.mesh import Mesh
from shared.model.sharding import (
    Box, Sharding, Span, boxes_of_span, make_shard, region_of, sharding_of, split_dimension, split_spans, whole_region,
)  # fmt: skip
from shared.parallel.strategy import ParallelStrategy
from shared.parallel.comm.threads import run_threads
from shared.totals import Totals

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
        sharding = split_spans(whole, ranges, world)
        part = sharding.local(whole)
        return part.numel(), sharding.gather(part, everyone=True), world.trace.calls(), world.trace.bytes()

    longest = max(stop - start for start, stop in ranges)
    for place, (numbers, gathered, calls, sizes) in enumerate(run_threads(rank, 3)):
        assert numbers == ranges[place][1] - ranges[place][0]
        assert gathered.dtype == dtype and torch.equal(gathered, whole)
        assert calls == {("all_gather", "world"): 1} and sizes == {("all_gather", "world"): 3 * longest * whole.element_size()}


@pytest.mark.parametrize(
    "ranges", [[(0, 4), (4, 10)], [(0, 4), (4, 7), (7, 9)], [(0, 5), (4, 7), (7, 10)], [(0, 4), (5, 7), (7, 10)], [(1, 4), (4, 7), (7, 10)]]
)
def test_ranges_that_do_not_make_the_whole_are_refused(ranges):
    with pytest.raises(ValueError, match=r"each of its 10 numbers\b.*\bonce"):
        run_threads(lambda world: split_spans(torch.empty(2, 5), ranges, world), 3)


def test_a_part_of_a_transposed_whole_is_the_right_one():
    """Newton-Schulz works on the transpose of a tall matrix, so what it returns need not be contiguous."""
    whole = torch.arange(10.0).reshape(2, 5)
    sharding = split_spans(torch.empty(5, 2), [(0, 5), (5, 10), (10, 10)], FirstOfThree())
    assert torch.equal(sharding.local(whole.T), whole.T.flatten()[:5])


def evenly(parameter, group) -> Sharding:
    edges = [parameter.numel() * rank // group.size for rank in range(group.size + 1)]
    return split_spans(parameter, list(zip(edges, edges[1:], strict=False)), group)


def owned(parameter, owner, group) -> Sharding:
    return split_spans(parameter, [(0, parameter.numel() if rank == owner else 0) for rank in range(group.size)], group)


def shards_of(model: nn.Module, shardings: dict[str, Sharding]) -> Parameters:
    """Shards that are views into the model's own memory."""
    return Parameters({name: make_shard(shardings[name].here.of(p.data), shardings[name], p) for name, p in model.named_parameters()})


def hand_gradients(model: nn.Module, shards: Parameters) -> Parameters:
    """Give each shard its part of the model's gradient; nothing to one of a matrix that another rank owns."""
    for name, parameter in model.named_parameters():
        shard = shards.named[name]
        if shard.numel() or Span(0, parameter.numel()) not in shard.sharding.parts:
            shard.grad = shard.sharding.local(parameter.grad).clone()
    return shards


def strategy_of(model: nn.Module, shards: Parameters, world) -> ParallelStrategy:
    engine = DataEngine(model, world)
    engine.optim_params = shards
    return ParallelStrategy(model, Mesh(ParallelConfig(data_parallel=world.size), world), [engine])


def with_gradients(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = 10 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def shard_all(model, group, whole_matrices: bool):
    """Every parameter sharded evenly; matrices owned by one rank in turn, where asked for."""
    shardings, turn = {}, 0
    for name, parameter in model.named_parameters():
        matrix = whole_matrices and parameter.dim() == 2 and "embedding" not in name and "head" not in name
        shardings[name] = owned(parameter, turn % group.size, group) if matrix else evenly(parameter, group)
        turn += matrix
    return shardings


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
        shards = shards_of(model, shard_all(model, world, whole_matrices))
        strategy = strategy_of(model, shards, world)
        optimizer, norms = build_optimizer(shards, config), []
        for _ in range(2):
            hand_gradients(with_gradients(model), shards)
            strategy.measured = None
            update = Update(max_norm=1.0, norm=strategy.grad_norm)
            update(shards, optimizer, torch.tensor(7))
            norms.append(update.gradient_norm.item())
        return shards, norms, name_optimizer_state(shards, optimizer)

    for shards, measured, state in run_threads(rank, 3):
        assert measured == pytest.approx(norms, rel=1e-12)
        assert {tuple(sorted(group["names"])) for group in state.groups} == {tuple(sorted(group["names"])) for group in expected.groups}
        for name, parameter in alone.named_parameters():
            shard = shards.named[name]
            torch.testing.assert_close(shard.data, shard.sharding.local(parameter.data), rtol=1e-9, atol=1e-12)
            for key, tensor in state.tensors.get(name, {}).items():
                if tensor.dim():
                    torch.testing.assert_close(tensor, shard.sharding.local(expected.tensors[name][key]), rtol=1e-9, atol=1e-12)


def test_muon_talks_about_no_matrix_that_a_rank_holds_whole():
    def rank(world):
        model = with_gradients(model_of())
        shards = shards_of(model, shard_all(model, world, whole_matrices=True))
        build_optimizer(hand_gradients(model, shards), CONFIGS["muon"]).step()
        return world.trace.calls()

    assert run_threads(rank, 2) == [{}, {}]


def test_the_norm_counts_shards_once_and_what_all_hold_once():
    """Digits: rank 0 holds 3 of a sharded parameter, rank 1 holds 4; both hold 12 of one that is whole everywhere."""

    def rank(world):
        model = nn.ParameterDict({"whole": nn.Parameter(torch.zeros(1)), "sharded": nn.Parameter(torch.zeros(2))})
        shard = make_shard(model["sharded"].data[world.rank : world.rank + 1], evenly(model["sharded"], world), model["sharded"])
        shard.grad, model["whole"].grad = torch.tensor([3.0 + world.rank]), torch.tensor([12.0])
        strategy = strategy_of(model, Parameters({"whole": model["whole"], "sharded": shard}), world)
        groups = {"first": {"sharded": shard.grad}, "second": {"whole": model["whole"].grad}, "third": {}}
        return strategy.grad_norm(), strategy.norms(groups), world.trace.calls()["all_reduce", "world"]

    for norm, by_group, calls in run_threads(rank, 2):
        assert norm.item() == 13.0 and norm.dtype == torch.float64 and calls == 2  # one for each call, however many groups
        assert {name: value.item() for name, value in by_group.items()} == {"first": 5.0, "second": 12.0}


def test_the_norm_is_measured_once_a_step_and_without_a_word_where_every_rank_has_everything():
    def rank(world):
        model = with_gradients(model_of().double())
        strategy = strategy_of(model, model, world)
        first = strategy.grad_norm()
        model.zero_grad()
        kept = strategy.grad_norm()
        strategy.reducer(model, Totals(torch.tensor(0.0), torch.tensor(1), {}))
        return first.item(), kept.item(), strategy.grad_norm().item(), world.trace.calls()["all_reduce", "world"]

    expected = global_gradient_norm(parameter.grad for parameter in with_gradients(model_of().double()).parameters()).item()
    assert run_threads(rank, 2) == [(expected, expected, 0.0, 0)] * 2


def test_a_shard_is_a_view_and_keeps_the_facts_and_whether_it_is_frozen():
    parameter = nn.Parameter(torch.zeros(2, 5), requires_grad=False)
    parameter.role, parameter.shared_over, parameter.partial_over = "expert", "some ranks", "others"
    flat = torch.zeros(10)
    shard = make_shard(flat[4:7], split_spans(parameter, [(4, 7), (0, 4), (7, 10)], FirstOfThree()), parameter)
    shard.data += 1
    assert flat.tolist() == [0.0] * 4 + [1.0] * 3 + [0.0] * 3
    assert (shard.role, shard.shared_over, shard.partial_over) == ("expert", "some ranks", "others")
    assert not shard.requires_grad and shard.sharding.shape == (2, 5)


class FirstOfThree(SingleRankCommunicator):
    def __init__(self):
        super().__init__()
        self.size = 3


def test_the_norm_of_shards_is_the_norm_of_one_process():
    model = with_gradients(model_of().double())
    expected = global_gradient_norm(parameter.grad for parameter in model.parameters())
    norms = run_threads(
        lambda world: strategy_of(model, hand_gradients(model, shards_of(model, shard_all(model, world, True))), world).grad_norm(), 3
    )
    assert [norm.item() for norm in norms] == pytest.approx([expected.item()] * 3, rel=1e-12)


# Boxes, and spans within them.


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_span_within_a_box_is_gathered_to_the_whole(dimension):
    """A matrix of 6 x 8 cut over two ranks along a dimension, and what each has over two more, unevenly."""
    whole = torch.arange(48.0).reshape(6, 8)

    def rank(world):
        tensor, data = world.split("tp", [(0, 1), (2, 3)]), world.split("dp", [(0, 2), (1, 3)])
        half = whole.shape[dimension] // 2
        box = split_dimension(whole, dimension, [(0, half), (half, 2 * half)], tensor)
        parameter = nn.Parameter(box.local(whole).clone())
        parameter.sharding = box
        nested = split_spans(parameter, [(0, 7), (7, 24)], data)
        shard = make_shard(nested.here.of(parameter.data), nested, parameter)
        assert torch.equal(nested.local(whole), shard.data) and region_of(parameter).is_box
        return nested.gather(shard.data, everyone=True), nested.shape, region_of(shard)

    found = run_threads(rank, 4)
    assert all(torch.equal(gathered, whole) and shape == whole.shape for gathered, shape, _ in found)
    assert sum(region.numel for *_, region in found) == 48 and len({region for *_, region in found}) == 4


def test_a_matrix_that_a_rank_owns_within_its_box_is_gathered_over_the_box_alone():
    def rank(world):
        tensor, data = world.split("tp", [(0, 1), (2, 3)]), world.split("dp", [(0, 2), (1, 3)])
        parameter = nn.Parameter(torch.full((3, 2), float(tensor.rank)))
        parameter.sharding = split_dimension(torch.empty(3, 4), 1, [(0, 2), (2, 4)], tensor)
        sharding = owned(parameter, 0, data)
        assert sharding.needs_gathering and sharding.is_owned == (data.rank == 0)
        return sharding.gather(parameter.data) if data.rank == 0 else None

    first, second, *others = run_threads(rank, 4)
    assert torch.equal(first, torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3)) and torch.equal(first, second) and others == [None, None]


@pytest.mark.parametrize("sizes", [(7,), (3, 5), (2, 3, 4), (1, 1, 6), (4, 1, 2)])
def test_every_range_of_flattened_numbers_is_the_boxes_that_it_is_read_as(sizes):
    whole = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            parts = [(first, box.of(whole).flatten().tolist()) for box, first in boxes_of_span(sizes, start, stop)]
            assert [number for _, numbers in parts for number in numbers] == list(range(start, stop))
            assert all(numbers[0] == first for first, numbers in parts) and len(parts) <= 2 * len(sizes)


def test_boxes_that_leave_something_out_are_refused():
    boxes = tuple(Box((start, 0), (1, 5)) for start in (0, 1, 1))
    with pytest.raises(ValueError, match="each of its 15 numbers"):
        Sharding(torch.Size((3, 5)), boxes, FirstOfThree())


def test_ranks_that_hold_too_little_of_a_parameter_may_not_save_it():
    def rank(world):
        kept = {"complete": whole_region([4]), "torn": whole_region([6])._replace(stop=5)}
        placement(world, (kept, {}))[0].require_complete()

    with pytest.raises(ValueError, match="5 of the 6 numbers of torn"):
        run_threads(rank, 2)


def test_a_parameter_without_sharding_is_whole():
    assert sharding_of(nn.Parameter(torch.zeros(2))) is None and region_of(torch.zeros(2, 3)) == whole_region((2, 3))


def test_a_stack_of_matrices_that_are_whole_here_needs_no_gathering():
    """Muon orthogonalises each expert by itself: only a matrix that is cut takes other ranks."""
    stack, pairs, single = torch.empty(6, 3, 3), [(0, 2), (2, 4), (4, 6)], [(0, 1), (1, 2), (2, 3)]
    assert not split_dimension(stack, 0, pairs, FirstOfThree()).needs_gathering
    assert split_dimension(stack, 1, single, FirstOfThree()).needs_gathering
    assert split_dimension(torch.empty(6, 3), 0, pairs, FirstOfThree()).needs_gathering
