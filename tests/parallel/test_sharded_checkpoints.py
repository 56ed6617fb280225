"""Checkpoints of any layout in any other, on the days when all goes well and on the others. Ranks are threads."""

import errno
import json
import os
import threading

import pytest
import torch
from layout_runs import LayoutRun, largest_difference
from safetensors import safe_open
from sharded_runs import ADAMW, MUON, SMALL, alone

from shared.engine.checkpoint.folder import CheckpointError, Checkpoints, fingerprint
from shared.engine.checkpoint.saver import Saver
from shared.engine.checkpoint import files
from shared.parallel import checkpoint as saving
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import parse_layout
from shared.parallel.comm.threads import run_threads
from shared.parallel.held import placement
from shared.engine.checkpoint.files import ShardFiles, key_of, write_shards
from shared.model.sharding import Box, Region, whole_region

LAYOUTS = ("one", "dp2", "dp3_zero1", "dp2_zero2", "fsdp2", "fsdp3", "dp2_fsdp2")
OPTIMIZERS = {"muon": (MUON, (0, 1, 3)), "adamw": (ADAMW, (2, 4, 5, 6))}  # with which of the layouts after the writer's to go on


def frozen(name: str) -> bool:
    return name.endswith("0.attention.q_proj.weight")


def run(layout: str, work, optimizer=MUON, **settings) -> list:
    """work(run) on each rank of a layout."""
    config = parse_layout(layout)
    make = lambda world: work(LayoutRun(world, config, optimizer=optimizer, frozen=frozen, **settings))  # noqa: E731
    return [make(SingleRankCommunicator())] if config.ranks == 1 else run_threads(make, config.ranks)


@pytest.fixture(scope="module")
def uninterrupted():
    return {rule: alone(SMALL, optimizer=optimizer, frozen=frozen).weights for rule, (optimizer, _) in OPTIMIZERS.items()}


@pytest.fixture
def saved(tmp_path):
    """Two steps on two ranks, of which each holds half; both saved."""
    run("fsdp2", lambda run: (run.train(1).save(tmp_path), run.train(1).save(tmp_path)))
    return tmp_path


def sentence_of(call) -> str:
    """Of the error that a rank meets."""
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_resuming_in_another_layout_gives_the_same_weights(writer, rule, tmp_path, uninterrupted):
    optimizer, offsets = OPTIMIZERS[rule]
    run(writer, lambda run: run.train(2).save(tmp_path), optimizer)
    for offset in offsets:
        reader = LAYOUTS[(LAYOUTS.index(writer) + offset) % len(LAYOUTS)]
        for weights in run(reader, lambda run: run.restore(tmp_path).train(1).weights(), optimizer, seed=7):
            assert largest_difference(weights, uninterrupted[rule]) < 1e-9, f"{writer} saved, {reader} went on"


def test_what_one_process_writes_is_chapter_04s_folder(tmp_path):
    run("one", lambda run: run.train(1).save(tmp_path / "here"))

    def plainly(run):
        saver = Saver(run.plain, Checkpoints(tmp_path / "there"), asynchronous=False)
        saver.save(1, run.optimizer, {"loader": run.train(1)}, {})

    run("one", plainly)
    here, there = (Checkpoints(tmp_path / name).path(1) for name in ("here", "there"))
    assert [path.name for path in sorted(here.iterdir())] == [path.name for path in sorted(there.iterdir())]
    for name in ("weights", "optimizer"):
        assert fingerprint(here / f"{name}.safetensors") == fingerprint(there / f"{name}.safetensors")
    assert run("fsdp2", lambda run: run.restore(tmp_path / "there").step) == [1, 1]


def test_chapter_04_reads_whole_what_ranks_wrote(saved):
    snapshot, weights = Checkpoints(saved).load(2), run("one", lambda run: run.restore(saved).weights())[0]
    assert largest_difference(snapshot.weights, weights) == 0
    moments = [tensor for tensor in snapshot.optimizer.tensors["head.linear.weight"].values() if tensor.dim()]
    assert {tensor.shape for tensor in moments} == {weights["head.linear.weight"].shape}


@pytest.mark.parametrize("layout", ["dp2", "dp2_zero1", "fsdp2"])
def test_ranks_share_out_what_is_written(layout, tmp_path):
    """Each number once, by whichever rank, and equally many by each."""
    whole = sum(tensor.numel() for tensor in run("one", lambda run: run.weights())[0].values())
    folder = run(layout, lambda run: run.train(1).save(tmp_path))[0]
    written = [sum(numbers_in(folder / f"weights-rank-{rank:05d}.safetensors")) for rank in range(2)]
    assert sum(written) == whole and max(written) < 0.6 * whole


def numbers_in(path) -> list[int]:
    with safe_open(path, "pt") as file:
        return [torch.Size(file.get_slice(key).get_shape()).numel() for key in file.keys()]


def test_a_rank_reads_what_it_needs_and_no_more(tmp_path, monkeypatch):
    run("one", lambda run: run.train(1).save(tmp_path))
    whole = sum(sum(numbers_in(tmp_path / "step-00000001" / f"{name}.safetensors")) for name in ("weights", "optimizer"))
    read = {}

    def counted(view, start, stop, before=files.read_numbers):
        numbers = before(view, start, stop)
        rank = threading.current_thread().name
        read[rank] = read.get(rank, 0) + numbers.is_floating_point() * numbers.untyped_storage().nbytes() // numbers.element_size()
        return numbers

    monkeypatch.setattr(files, "read_numbers", counted)
    run("fsdp2", lambda run: run.restore(tmp_path))
    assert len(read) == 2 and max(read.values()) < 0.6 * whole and whole <= sum(read.values()) < 1.01 * whole  # counts of steps twice


def edit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_a_file(path):
    """As if it had never been written: the manifest knows nothing of it."""
    path.unlink()
    manifest = path.with_name("manifest.json")
    manifest.write_text(json.dumps({name: entry for name, entry in json.loads(manifest.read_text()).items() if name != path.name}))


DAMAGE = {
    "one bit of a rank's weights": ("weights-rank-00001.safetensors", edit, "weights-rank-00001.safetensors is not what was saved"),
    "one bit of a rank's state": ("optimizer-rank-00000.safetensors", edit, "optimizer-rank-00000.safetensors is not what was saved"),
    "a file cut short": ("weights-rank-00000.safetensors", lambda path: os.truncate(path, 9), r"has 9 bytes of"),
    "a file removed": ("optimizer-rank-00001.safetensors", lambda path: path.unlink(), "optimizer-rank-00001.safetensors is missing"),
    "a rank's file never there": ("weights-rank-00001.safetensors", lose_a_file, "its files hold 200 of the 400 numbers"),
    "no manifest": ("manifest.json", lambda path: path.unlink(), "its manifest.json is missing"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_all_ranks_fall_back_from_a_damaged_checkpoint_to_the_previous_one(what, saved):
    file, damage, sentence = DAMAGE[what]
    damage(saved / "step-00000002" / file)

    def restored(run):
        return run.saver(saved).restore(run.optimizer, {"loader": run})

    answers = run("fsdp2", restored)
    assert [step for step, _ in answers] == [1, 1] and answers[0] == answers[1]
    with pytest.raises(CheckpointError, match=sentence):
        raise CheckpointError(answers[0][1][0])


def test_where_none_is_intact_all_ranks_refuse(saved):
    for step in (1, 2):
        edit(saved / f"step-0000000{step}" / "weights-rank-00000.safetensors")
    said = run("dp2", lambda run: sentence_of(lambda: run.restore(saved)))
    assert said[0] == said[1] and "No checkpoint in" in said[0]


def test_another_model_is_refused_by_name(saved):
    said = run(
        "fsdp2", lambda run: sentence_of(lambda: run.restore(saved)), config=SMALL.__class__(**vars(SMALL) | {"intermediate_size": 31})
    )
    assert said[0] == said[1] and "[31, 20] here and [29, 20] in the saved run" in said[0]


def test_ranks_with_different_checkpoint_folders_are_refused(saved, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    said = run("dp2", lambda run: sentence_of(lambda: run.restore([saved, empty][run.world.rank])))
    assert all("Rank 1 sees checkpoints of steps [] in" in each and "all ranks need the same folder" in each for each in said)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_rank_that_cannot_write_fails_all_with_one_sentence(saved, asynchronous, monkeypatch):
    """The checkpoints before it stand, training goes on, and a later save succeeds."""
    failed, before = threading.Event(), saving.stage_files

    def write(folder, files, problem):
        if "weights-rank-00001.safetensors" in files and not failed.is_set():
            failed.set()
            return {}, os.strerror(errno.ENOSPC)
        return before(folder, files, problem)

    def work(run):
        saver = run.restore(saved).train(1).saver(saved, asynchronous=asynchronous)
        saver.save(run.step, run.optimizer, {"loader": run}, {})
        said = sentence_of(lambda: saver.finished(wait=True))
        saver.save(run.step, run.optimizer, {"loader": run}, {})
        saver.finished(wait=True)
        saver.close()
        return said

    monkeypatch.setattr(saving, "stage_files", write)
    said = run("fsdp2", work)
    assert said[0] == said[1]
    assert (
        "The checkpoint of step 3 could not be written" in said[0] and "(rank 1: No space left on device). Step 2 is still saved" in said[0]
    )
    assert Checkpoints(saved).steps() == [2, 3] and not [path for path in saved.iterdir() if path.suffix]


def test_nobody_takes_a_checkpoint_for_complete_before_all_have_written(tmp_path, monkeypatch):
    """And what is written is what the weights were when it was asked for."""
    go_on, before = threading.Event(), saving.stage_files

    def slow(folder, files, problem):
        if any("rank-00001" in name for name in files):
            assert go_on.wait(600)
        return before(folder, files, problem)

    monkeypatch.setattr(saving, "stage_files", slow)

    def work(run):
        saver, weights = run.train(1).saver(tmp_path), run.weights()
        saver.save(1, run.optimizer, {"loader": run}, {})
        run.train(1)
        early, listed = saver.finished(), Checkpoints(tmp_path).steps()
        run.world.barrier()
        go_on.set()
        late = saver.finished(wait=True)
        saver.close()
        return early, listed, late, weights

    for early, listed, late, weights in run("fsdp2", work):
        assert early is None and listed == [] and late == tmp_path / "step-00000001"
    assert largest_difference(run("one", lambda run: run.restore(tmp_path).weights())[0], weights) == 0


def test_a_save_that_is_under_way_when_a_run_of_one_rank_breaks_off_is_made_complete(tmp_path):
    """As chapter 04's saver makes it; without, the last good state before a broken step would be thrown away, written as it is."""

    def work(run):
        saver = run.train(1).saver(tmp_path, asynchronous=True)
        saver.save(1, run.optimizer, {"loader": run}, {})
        saver.close()

    run("one", work)
    assert Checkpoints(tmp_path).steps() == [1] and not [path for path in tmp_path.iterdir() if path.suffix]


def test_the_best_is_what_rank_0_sees(saved):
    assert run("dp2", lambda run: run.saver(saved).is_best(1.0)) == [True, True]


def test_what_all_hold_is_shared_out_evenly():
    both = {name: whole_region([size]) for name, size in (("a", 5), ("b", 3), ("c", 2))}
    assert written_by([both, both]) == [["a"], ["b", "c"]]
    assert written_by([{"a": whole_region([9])._replace(stop=5)}, {"a": whole_region([9])._replace(start=5)}]) == [["a"], ["a"]]


def written_by(held) -> list[list[str]]:
    writers = run_threads(lambda world: placement(world, (held[world.rank], {}))[0].writers(range(world.size)), len(held))[0]
    return [sorted(name for (name, _), writer in writers.items() if writer == rank) for rank in range(len(held))]


@pytest.mark.parametrize(
    "region, key",
    [
        (Region((4, 6), (0, 0), (4, 6), 0, 24), "w"),
        (Region((4, 6), (0, 0), (4, 6), 5, 17), "w[5:17]"),
        (Region((4, 6), (0, 3), (4, 3), 0, 12), "w[0:4,3:6]"),
        (Region((4, 6), (0, 3), (4, 3), 2, 7), "w[0:4,3:6][2:7]"),
        (Region((6,), (2,), (3,), 0, 3), "w[2:5]"),
        (Region((6,), (2,), (3,), 1, 3), "w[2:5][1:3]"),
        (Region((), (), (), 0, 1), "w"),
    ],
)
def test_a_shards_key_says_where_its_numbers_lie(region, key, tmp_path):
    """And what is written under it is read where it belongs, by a region that overlaps it."""
    whole = torch.arange(float(torch.Size(region.shape).numel())).reshape(region.shape)
    part = Box(region.offsets, region.sizes).of(whole).reshape(-1)[region.start : region.stop]
    rest = [(box, first) for box, first in region.boxes()]
    assert key_of("w", region) == key and torch.equal(torch.cat([box.of(whole).reshape(-1) for box, _ in rest]), part)
    write_shards(tmp_path / "weights.safetensors", {("w", region): part})
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        stored = files.shards_in(file)["w"]
        found = files.read_region(tmp_path, "w", stored, region)
        assert torch.equal(found.reshape(-1), part) and found.shape == region.local_shape
        if not region.is_whole:
            with pytest.raises(CheckpointError, match="numbers are in none of its files"):
                files.read_region(tmp_path, "w", stored, whole_region(region.shape))


def test_boxes_that_overlap_and_leave_a_gap_are_damage_although_their_sizes_add_up(tmp_path):
    rows = [Region((4, 2), (start, 0), (2, 2), 0, 4) for start in (0, 1)]
    write_shards(tmp_path / "weights.safetensors", {("w", region): torch.ones(2, 2) for region in rows})
    with pytest.raises(CheckpointError, match="of w, 2 numbers are in none of its files"):
        ShardFiles({"w": whole_region((4, 2))}, {}, []).read(tmp_path, "weights", {"w": ["float32", [4, 2]]})
