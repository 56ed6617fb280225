"""Sharded checkpoints whose checksums fit and whose content does not: all ranks name the damage, and take the same checkpoint before it."""

import shutil

import pytest
import torch
from layout_runs import LayoutRun, largest_difference
from resigned import drop, resigned, set_at, state, tensors, text
from safetensors import safe_open
from sharded_runs import ADAMW, SMALL

from shared.engine.checkpoint.soundness import CheckpointError, DamagedCheckpoint
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout

LAYOUT = parse_layout("fsdp2")


def run(work, ranks=LAYOUT, **settings) -> list:
    return run_threads(lambda world: work(LayoutRun(world, ranks, optimizer=ADAMW, **settings)), ranks.ranks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run(lambda run: (run.train(1).save(folder), run.train(1).save(folder)))
    return folder, run(lambda run: run.train(1).weights())[0]


def sharded(content):
    """The first shard with a region in its key."""
    return next(key for key in sorted(content) if "[" in key)


def moved(content):
    """A shard says that its numbers lie one further on."""
    key = sharded(content)
    start, stop = map(int, key[key.index("[") + 1 : -1].split(":"))
    content[f"{key[: key.index('[')]}[{start - 1}:{stop - 1}]"] = content.pop(key)


def overlapping(folder):
    """A third file, which the manifest lists, has half of what the second one has."""
    path = folder / "weights-rank-00001.safetensors"
    shutil.copy(path, folder / "weights-rank-00002.safetensors")

    def halve(content):
        key = sharded(content)
        start, stop = map(int, key[key.index("[") + 1 : -1].split(":"))
        kept = content[key][: (stop - start) // 2]
        content.clear()
        content[f"{key[: key.index('[')]}[{start}:{start + len(kept)}]"] = kept

    tensors("weights-rank-00002", halve)(folder)


def cut(content):
    content[sharded(content)] = content[sharded(content)][1:]


def half(content):
    content.update({name: tensor.half() for name, tensor in content.items()})


def rename(old, new):
    return resigned(lambda folder: (folder / old).rename(folder / new))


CHANGES = {
    "a state that is a list": (text("[]"), r"the state is \[\]"),
    "another step": (state(set_at("step", 7)), "it is the state after step 7"),
    "a part that rank 1's code cannot take": (state(set_at("parts", "loader", {})), r"its state of loader cannot be taken \(KeyError"),
    "no generators of rank 1": (state(set_at("random_of_ranks", 0, [])), r"random_of_ranks\[0\] is \[\]"),
    "generators in words": (state(set_at("random_of_ranks", "none")), "random_of_ranks is 'none'"),
    "half the state of rank 1's generators": (
        state(set_at("random_of_ranks", 0, "python", [3, [1], None])), "its random-rank-00001 is not a state of the generators"
    ),
    "rank 1's file of generators lost": (
        resigned(lambda folder: (folder / "random-rank-00001.safetensors").unlink()), "cpu is not there"
    ),
    "rank 1's torch state cut": (tensors("random-rank-00001", lambda it: it.update(cpu=it["cpu"][:-8])), r"cpu is uint8 \[5048\]"),
    "a rank's weights lost": (
        resigned(lambda folder: (folder / "weights-rank-00001.safetensors").unlink()), r"its files hold \d+ of the \d+ numbers of"
    ),
    "a rank's averages lost": (
        resigned(lambda folder: (folder / "optimizer-rank-00000.safetensors").unlink()), "its files hold .* numbers of exp_avg/"
    ),
    "a shard elsewhere": (tensors("weights-rank-00001", moved), "numbers are in none of its files"),
    "a shard cut": (tensors("weights-rank-00001", cut), "has the shape"),
    "shards that overlap": (overlapping, r"its files hold 845 of the 580 numbers"),
    "weights for averages": (rename("weights-rank-00000.safetensors", "optimizer-rank-00002.safetensors"), "of the .* numbers|table"),
    "a shard in half precision": (tensors("weights-rank-00001", half), "several dtypes"),
    "all shards in half precision": (
        lambda folder: [tensors(f"weights-rank-0000{rank}", half)(folder) for rank in (0, 1)],
        r"is float16 .*, and float64 .* in its table of contents",
    ),
    "no JSON of shapes": (tensors("weights-rank-00000", lambda it: None, set_at("shapes", "{")), "does not say where its numbers lie"),
    "shapes in words": (tensors("weights-rank-00000", lambda it: None, set_at("shapes", '{"a": 3}')), "table of contents|numbers"),
    "no shapes": (tensors("weights-rank-00000", lambda it: None, dict.clear), "table of contents|numbers"),
    "an average more": (tensors("optimizer-rank-00001", set_at("exp_avg/nobody", torch.ones(2))), "exp_avg/nobody is float32"),
    "a table that lacks an average": (
        state(drop("contents", "tensors", "optimizer", "exp_avg/head.linear.weight")), "exp_avg/head.linear.weight is float64"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_all_ranks_take_the_one_before_a_checkpoint_that_does_not_agree_with_itself(saved, tmp_path, what):
    change, sentence = CHANGES[what]
    folder = shutil.copytree(saved[0], tmp_path / "run")
    change(folder / "step-00000002")

    def restored(run):
        answer = run.saver(folder).restore(run.optimizer, {"loader": run})
        return answer, run.weights()

    answers = run(restored, seed=7)
    assert [answer[0] for answer, _ in answers] == [1, 1] and answers[0][0] == answers[1][0]
    damaged = answers[0][0][1]
    assert len(damaged) == 1 and "step-00000002 is damaged" in damaged[0] and "\n" not in damaged[0]
    with pytest.raises(CheckpointError, match=sentence):
        raise CheckpointError(damaged[0])
    assert all(largest_difference(found, saved[1]) == 0 for _, found in answers)


def test_a_part_that_only_one_rank_cannot_take_sends_all_to_the_one_before(saved):
    def restored(run):
        take = run.load_state_dict
        if run.world.rank == 1:
            run.load_state_dict = lambda content: take(content) if content["step"] == 1 else 1 / 0
        return run.saver(saved[0]).restore(run.optimizer, {"loader": run})

    answers = run(restored)
    assert [step for step, _ in answers] == [1, 1] and "loader cannot be taken (ZeroDivisionError" in answers[0][1][0]


def test_damage_that_one_rank_finds_comes_before_what_another_refuses(saved):
    """What is damaged fits no run, so the one before it is tried."""

    def raised(run):
        def fail():
            raise DamagedCheckpoint("cut short") if run.world.rank == 1 else CheckpointError("another model")

        with pytest.raises(DamagedCheckpoint, match="cut short"):
            run.saver(saved[0]).checkpoints.agreed(fail)

    run(raised)


def test_what_is_intact_and_of_another_model_is_refused_and_not_skipped(saved):
    larger = SMALL.__class__(**vars(SMALL) | {"intermediate_size": 31})

    def refused(run):
        with pytest.raises(CheckpointError, match="does not fit this run") as caught:
            run.restore(saved[0])
        return str(caught.value)

    said = run(refused, config=larger)
    assert said[0] == said[1] and "step-00000002" in said[0] and "step-00000001" not in said[0] and "damaged" not in said[0]


def test_the_table_of_contents_is_the_same_whichever_layout_wrote_it(saved, tmp_path):
    def contents(folder):
        found = {}
        state(lambda it: found.update(it["contents"]["tensors"]))(folder)
        return {name: found[name] for name in ("weights", "optimizer")}

    run(lambda run: run.train(2).save(tmp_path), parse_layout("dp2"))
    assert contents(tmp_path / "step-00000002") == contents(shutil.copytree(saved[0] / "step-00000002", tmp_path / "other"))
    with safe_open(tmp_path / "other" / "weights-rank-00000.safetensors", "pt") as file:
        assert any("[" in key for key in file.keys())
