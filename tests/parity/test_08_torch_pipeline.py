"""Pipeline parallelism on PyTorch's `torch.distributed.pipelining` (backend torch) over gloo: it does what one process does, in float64,
for every schedule and beside replicas, `fully_shard` and `parallelize_module`; and checkpoints cross between backends."""

import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_runs import largest_difference
from pipeline_runs import expected, half_packed, make, observed, require_same, runner_of
from tensor_runs import without_noise

from shared.course.errors import SettingError
from shared.model.chunked_loss import packed_next_token_objective
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.processes.launch import run_processes

Case = tuple[str, str, str, str, str]  # layout, family, optimizer, schedule, activation checkpointing
TWO: list[Case] = [
    ("pp2", "llama", "muon", "1f1b", "none"), ("pp2", "gpt2", "adamw", "gpipe", "selective"),
    ("pp2", "bloom", "sgd", "interleaved", "none"), ("pp2", "qwen3", "adamw", "zero_bubble", "none"),
    ("pp2", "gpt2", "sgd", "zero_bubble", "full"),
]  # fmt: skip
FOUR: list[Case] = [
    *(("pp4", family, "adamw", schedule, "none") for family in ("gpt2", "qwen3") for schedule in ("gpipe", "1f1b", "zero_bubble")),
    *((layout, family, "muon", "1f1b", "none") for layout in ("pp2_dp2", "pp2_tp2", "pp2_fsdp2") for family in ("llama", "gpt2", "bloom")),
    ("pp2_dp2", "gpt2", "muon", "zero_bubble", "none"), ("pp2_dp2_zero1", "llama", "adamw", "interleaved", "none"),
    ("pp2_tp2_sp", "gpt2", "sgd", "gpipe", "full"), ("pp2_fsdp2", "qwen3", "adamw", "gpipe", "full"),
]  # fmt: skip
HANDED = [  # writer and reader, each backend, schedule
    (("course", "zero_bubble"), ("torch", "interleaved")), (("torch", "1f1b"), ("course", "gpipe")),
    (("torch", "interleaved"), ("torch", "1f1b")),
]  # fmt: skip
FROZEN = ("embedding", "blocks.0", "blocks.1", "blocks.2.attention")


def by_torch(world: Communicator, layout: str, *arguments, recomputed: str = "none", **settings):
    return make(world, layout, *arguments, backend="torch", activation_checkpointing=recomputed, **settings)


def trained(world: Communicator, cases: list[Case]) -> dict[Case, dict]:
    return {case: observed(by_torch(world, *case[:4], recomputed=case[4])) for case in cases}


def features(world: Communicator, layout: str) -> dict[str, dict]:
    """What one process does with parts frozen, and with a loss scale."""
    backend = {"backend": "torch"} if world.size > 1 else {}
    build = partial(make, world, layout, "llama", "adamw", **backend)
    frozen = lambda name: any(part in name for part in FROZEN)  # noqa: E731
    scaler = LossScaler(LossScaleConfig(initial=1024.0))
    return {"frozen": observed(build(frozen=frozen)), "scaled": observed(build(scaler=scaler))}


def handed_over(world: Communicator) -> list[dict]:
    """For each pair the reader's weights."""
    found = []
    for (writer, schedule), (reader, other) in HANDED:
        folder = Path(world.gather_objects(tempfile.mkdtemp() if world.rank == 0 else None)[0])
        make(world, "pp2", "gpt2", "adamw", schedule, backend=writer).train(2).save(folder)
        found.append(make(world, "pp2", "gpt2", "adamw", other, backend=reader, seed=7).restore(folder).train(1).weights())
    return found


def shapes(world: Communicator) -> dict:
    """PyTorch's engine is made once for a shape, and no step asks the ranks for one; an evaluation between steps changes nothing."""

    def refuse(*arguments, **options):
        raise AssertionError("a stage asks for shapes")

    dist.send_object_list, kept = refuse, dist.send_object_list
    try:
        run = by_torch(world, "pp2", "llama")
        engines = [runner_of(run.train(1)).engine]
        model = run.parallel.model.eval()
        totals = packed_next_token_objective(model, half_packed(9, 1, run.config))
        model.train()
        engines.append(runner_of(run.train(1)).engine)
        run.microbatches = 3
        engines.append(runner_of(run.train(1)).engine)
    finally:
        dist.send_object_list = kept
    return {"same": engines[0] is engines[1], "other": engines[1] is not engines[2], "evaluated": totals.loss_sum}


def refusals(world: Communicator) -> dict[str, str]:
    """What each attempt was told, by its name."""

    uneven = by_torch(world, "pp2")
    uneven.batches = lambda step, number, config: {name: rows[:, : 8 + number] for name, rows in half_packed(step, number, config).items()}
    attempts = {
        "uneven": uneven,
        "few": by_torch(world, "pp2", microbatches=1),
        "odd": by_torch(world, "pp2", "llama", "sgd", "zero_bubble", microbatches=5),
    }
    told = {}
    for name, run in attempts.items():
        try:
            run.train(1)
        except SettingError as error:
            told[name] = str(error)
    return told


def of_two_rows(model, batch):
    return packed_next_token_objective(model, {name: rows[:2] for name, rows in batch.items()})


def with_two_rows(world: Communicator) -> None:
    by_torch(world, "pp2", objective=of_two_rows).train(1)


def by_two(world: Communicator, cases: list[Case]) -> dict:
    more = {"features": features(world, "pp2"), "handed": handed_over(world), "shapes": shapes(world), "refused": refusals(world)}
    return trained(world, cases) | more


@pytest.fixture(scope="module")
def on_two():
    return run_processes(by_two, 2, TWO, timeout=300)


@pytest.fixture(scope="module")
def on_four():
    return run_processes(trained, 4, FOUR, timeout=600)


@pytest.mark.parametrize("case", TWO, ids=", ".join)
def test_two_processes_do_what_one_does(case, on_two):
    require_same([found[case] for found in on_two], expected(*case[1:3]))


def test_frozen_stages_and_a_loss_scale(on_two):
    one = features(SingleRankCommunicator(), "one")
    for name in ("frozen", "scaled"):
        known = lambda found: found | {"gradients": {n: g for n, g in found["gradients"].items() if g is not None}}  # noqa: E731
        require_same([known(found["features"][name]) for found in on_two], known(one[name]))


@pytest.mark.parametrize("number", range(len(HANDED)))
def test_each_backend_resumes_the_others_checkpoints(number, on_two):
    merged = {name: tensor for found in on_two for name, tensor in found["handed"][number].items()}
    assert largest_difference(without_noise(merged), without_noise(expected("gpt2", "adamw")["weights"])) < 1e-9


def test_no_step_asks_for_shapes_and_evaluation_runs_between_steps(on_two):
    run = make(SingleRankCommunicator(), "one", "llama").train(1)
    evaluated = packed_next_token_objective(run.parallel.model.eval(), half_packed(9, 1, run.config)).loss_sum
    for found in on_two:
        assert found["shapes"]["same"] and found["shapes"]["other"]
        torch.testing.assert_close(found["shapes"]["evaluated"], evaluated, rtol=1e-9, atol=0)


def test_what_pytorchs_stages_cannot_take_is_refused(on_two):
    for told in (found["refused"] for found in on_two):
        assert "micro-batches have the shapes [(12, 8), (12, 9), (12, 10), (12, 11)]" in told["uneven"]
        assert "cannot run pipeline_schedule 1f1b with 1 micro-batches on 2 ranks" in told["few"]
        assert "cannot run pipeline_schedule zero_bubble with 5 micro-batches on 2 ranks" in told["odd"]
    with pytest.raises(SettingError, match=r"with ids \[2, 12\], and the batch has input_ids \[12, 12\]"):
        run_processes(with_two_rows, 2, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=", ".join)
def test_four_processes_do_what_one_does(case, on_four):
    require_same([found[case] for found in on_four], expected(*case[1:3]))
