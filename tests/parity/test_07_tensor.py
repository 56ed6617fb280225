"""Tensor parallelism on PyTorch's `parallelize_module` (backend torch): each family equals one process, beside DDP, ZeRO, `fully_shard`,
and checkpoints cross between backends and layouts. Two processes over gloo run all that two ranks can; four run what needs four."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from layout_runs import LayoutRun, largest_difference
from layouts import Difference, difference
from sharded_runs import ADAMW, MUON, translation_objective
from step_records import STEPS, RunRecord
from tensor_runs import FAMILIES, SGD, batches, config_of, drawn, with_dropout, without_noise

from shared.course.errors import SettingError
from shared.loss import next_token_objective
from shared.model.chunked_loss import packed_next_token_objective, token_log_probs
from shared.model.hf.pretrained import open_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import AXES, apply_parallel
from shared.parallel.processes.launch import run_processes
from shared.parallel.tensor.axis import TensorParallel

CUT = [family for family in FAMILIES if family != "mqa"]  # a style would cut its only key and value head
FEATURES = {  # what one process can do as well
    "sgd": {"optimizer": SGD},
    "adamw": {"optimizer": ADAMW},
    "muon": {"optimizer": MUON},
    "frozen": {"optimizer": ADAMW, "frozen": lambda name: "norm" in name or "blocks.1.attention" in name},
    "whole logits": {"optimizer": SGD, "objective": next_token_objective},
}
Case = tuple[str, str, str, str]  # layout, family, feature, activation checkpointing
TWO: list[Case] = [
    *(("tp2", family, "sgd", "none") for family in CUT),
    *(("tp2_sp", family, "frozen", "none") for family in ("gpt2", "qwen3")),
    ("tp2_sp", "t5", "sgd", "full"), ("tp2", "gpt2", "muon", "none"), ("tp2_sp", "bert", "whole logits", "selective"),
]  # fmt: skip
FOUR: list[Case] = [
    *((layout, family, "sgd", "none") for layout in ("tp4", "tp4_sp") for family in CUT if config_of(family).num_key_value_heads == 4),
    *((layout, family, feature, "none") for layout in ("dp2_tp2", "dp2_tp2_zero1_sp", "fsdp2_tp2", "fsdp2_tp2_sp")
      for family in ("gpt2", "qwen3") for feature in ("adamw", "muon")),
    ("fsdp2_tp2", "t5", "sgd", "full"), ("fsdp2_tp2_sp", "bert", "frozen", "full"),
]  # fmt: skip
HANDED = [
    ("course tp2", "torch tp2_sp"), ("torch tp2", "course fsdp2"), ("torch tp2_sp", "torch dp2"), ("course dp2_zero1", "torch tp2"),
]  # fmt: skip
HANDED_BY_FOUR = [
    ("course fsdp2_tp2", "torch fsdp2_tp2_sp"), ("torch fsdp2_tp2", "course dp2_tp2_zero1"), ("torch dp2_tp2_zero1", "torch tp4"),
    ("torch tp4_sp", "course fsdp4"), ("course tp4", "torch dp2_tp2"),
]  # fmt: skip


def layout_of(word: str, backend: str, **settings) -> ParallelConfig:
    return replace(parse_layout(word), backend=backend, **settings)


def spread(world: Communicator, layout: ParallelConfig, family: str, seed: int = 0, **feature) -> LayoutRun:
    objective = feature.pop("objective", translation_objective if family == "t5" else packed_next_token_objective)
    settings = {"config": config_of(family), "objective": objective, "batches": batches, "axes": (*AXES, TensorParallel())}
    return LayoutRun(world, layout, seed=seed, **settings, **feature)


def alone(family: str, feature: str) -> RunRecord:
    return denoised(spread(SingleRankCommunicator(), ParallelConfig(), family, **FEATURES[feature]).record())


def denoised(record: RunRecord) -> RunRecord:
    known = lambda tensors: {name: tensor for name, tensor in tensors.items() if tensor is not None}  # noqa: E731
    return replace(record, gradients=[without_noise(known(each)) for each in record.gradients], weights=without_noise(record.weights))


def trained(world: Communicator, cases: list[Case], expected: dict[tuple[str, str], RunRecord]) -> dict[Case, Difference]:
    found = {}
    for layout, family, feature, recomputed in cases:
        spreading = layout_of(layout, "torch", activation_checkpointing=recomputed)
        record = denoised(spread(world, spreading, family, **FEATURES[feature]).record())
        found[layout, family, feature, recomputed] = difference(record, expected[family, feature])
    return found


def handed_over(world: Communicator, pairs: list[tuple[str, str]], expected: RunRecord) -> dict[tuple[str, str], float]:
    """(writer, reader), each `backend layout` -> how far the weights are from one process that was not interrupted."""
    found = {}
    for writer, reader in pairs:
        folder = Path(world.gather_objects(tempfile.mkdtemp() if world.rank == 0 else None)[0])
        made = lambda words, seed: spread(world, layout_of(*reversed(words.split())), "gpt2", seed, optimizer=MUON)  # noqa: E731
        made(writer, 0).train(STEPS - 1).save(folder)
        weights = without_noise(made(reader, 7).restore(folder).train(1).weights())
        found[writer, reader] = largest_difference(weights, expected.weights)
    return found


def from_meta(world: Communicator, layout: str) -> tuple[float, float]:
    """How far the weights of a model that was cut on the meta device are from one that was built: initial ones, and read from a folder."""
    with torch.device("meta"):
        model = TransformerModel(config_of("qwen3"), seed=3)
    built = TransformerModel(config_of("qwen3"), seed=3)
    folder = Path(world.gather_objects(tempfile.mkdtemp() if world.rank == 0 else None)[0])
    if world.rank == 0:
        save_pretrained(built, folder)
    world.barrier()
    found = []
    for on_meta in (model, open_pretrained(folder)):
        strategy = apply_parallel(on_meta, Mesh(layout_of(layout, "torch"), world), seed=3, axes=(*AXES, TensorParallel()))
        whole = {name: tensor for name, tensor in strategy.whole_weights() if tensor is not None}
        found.append(largest_difference(whole, dict(built.named_parameters())))
    return tuple(found)


def log_probabilities(world: Communicator) -> tuple[float, float]:
    """How far the log-probability of each token, and its gradient for the embedding, are from one process."""
    ids = torch.arange(24).view(2, 12) % 31
    told = []
    for layout in (ParallelConfig(), layout_of("tp2", "torch")):
        here = world if layout.ranks > 1 else SingleRankCommunicator()
        run = spread(here, layout, "llama", optimizer=SGD)
        values = run.parallel.model(ids, head_fn=partial(token_log_probs, targets=ids.roll(-1, 1), rows=5))
        (values * torch.linspace(0, 1, 12)).sum().backward()
        told.append((values.detach(), run.gradients()))
    (found, gradients), (expected, wanted) = reversed(told)
    return float((found - expected).abs().max()), largest_difference(gradients, wanted)


def dropped_out(world: Communicator) -> dict[str, tuple]:
    """Layout -> after a step with dropout the generator's state and the replicated weights; how far recomputing is from not; masks of a cut
    model."""
    found = {}
    for layout in ("tp2", "tp2_sp"):
        weights, state, named = with_dropout(world, layout, backend="torch")
        again, _, _ = with_dropout(world, layout, "full", "torch")
        replicated = [tensor.detach() for tensor in named.values() if not hasattr(tensor, "sharding")]
        model = TransformerModel(replace(config_of("gpt2"), hidden_dropout=0.5, attention_dropout=0.5))
        TensorParallel().shape(model, Mesh(layout_of(layout, "torch"), world))
        found[layout] = [state, *replicated], largest_difference(without_noise(weights), without_noise(again)), drawn(model)
    return found


def refusals(world: Communicator) -> dict[str, str]:
    """What each attempt was told, by its name."""
    cut = partial(spread, world, layout_of("tp2_sp", "torch"))
    attempts = {
        "one head": lambda: cut("mqa"),
        "7 positions": lambda: cut("llama").parallel.model(torch.zeros(1, 7, dtype=torch.int64)),
        "compile": lambda: cut("llama").parallel.model.compile(),
        "compile a block": lambda: cut("llama").plain.stack.blocks["0"].compile(),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except SettingError as error:
            told[name] = str(error)
    return told


def by_two(world: Communicator, expected) -> dict:
    handed = handed_over(world, HANDED, expected["gpt2", "muon"])
    more = {"meta": from_meta(world, "tp2"), "log-probabilities": log_probabilities(world), "refused": refusals(world)}
    more["dropout"] = dropped_out(world)
    return {"trained": trained(world, TWO, expected), "handed": handed} | more


def by_four(world: Communicator, expected) -> dict:
    handed = handed_over(world, HANDED_BY_FOUR, expected["gpt2", "muon"])
    return {"trained": trained(world, FOUR, expected), "handed": handed, "meta": from_meta(world, "fsdp2_tp2")}


@pytest.fixture(scope="module")
def expected():
    return {pair: alone(*pair) for pair in dict.fromkeys((family, feature) for _, family, feature, _ in TWO + FOUR)}


@pytest.fixture(scope="module")
def on_two(expected):
    return run_processes(by_two, 2, expected, timeout=300)


@pytest.fixture(scope="module")
def on_four(expected):
    return run_processes(by_four, 4, expected, timeout=600)


@pytest.mark.parametrize("case", TWO, ids=", ".join)
def test_two_ranks_give_what_one_process_gives(case, on_two):
    assert all(far < 1e-9 for found in on_two for far in found["trained"][case].values()), on_two[0]["trained"][case]


@pytest.mark.parametrize("pair", HANDED, ids=" to ".join)
def test_each_backend_resumes_the_others_checkpoints(pair, on_two):
    assert all(found["handed"][pair] < 1e-9 for found in on_two)


def test_a_model_on_the_meta_device_gets_its_slices_of_initial_or_stored_weights(on_two):
    assert all(found["meta"] == (0, 0) for found in on_two)


def test_log_probabilities_of_tokens_from_a_cut_vocabulary(on_two):
    assert all(far < 1e-12 for found in on_two for far in found["log-probabilities"])


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp"])
def test_dropout_leaves_the_ranks_generators_and_replicated_weights_equal(layout, on_two):
    (first, far, masks), (second, _, other_masks) = (found["dropout"][layout] for found in on_two)
    assert len(first) > 3 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and far < 1e-12
    assert [torch.equal(*both) for both in zip(masks, other_masks, strict=True)] == [layout == "tp2", False, True]


def test_what_the_styles_cannot_cut_is_refused(on_two):
    for found in on_two:
        assert "tensor_parallel of at most 1, or backend course, which repeats heads" in found["refused"]["one head"]
        assert "7 positions do not divide by that: give 6 or 8" in found["refused"]["7 positions"]
        assert "Set engine.compile to false" in found["refused"]["compile"] == found["refused"]["compile a block"]


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=", ".join)
def test_four_ranks_give_what_one_process_gives(case, on_four):
    assert all(far < 1e-9 for found in on_four for far in found["trained"][case].values()), on_four[0]["trained"][case]


@pytest.mark.slow
@pytest.mark.parametrize("pair", HANDED_BY_FOUR, ids=" to ".join)
def test_four_ranks_resume_each_others_checkpoints(pair, on_four):
    assert all(found["handed"][pair] < 1e-9 for found in on_four)


@pytest.mark.slow
def test_shards_of_slices_of_a_model_on_the_meta_device(on_four):
    assert all(found["meta"] == (0, 0) for found in on_four)
