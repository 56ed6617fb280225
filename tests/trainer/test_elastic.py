"""Elastic training: which layout is chosen for the ranks that are there, and runs over ranks that leave and join."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import elastic_kills
import pytest
import torch
from elastic_runs import ElasticRun, starts
from layout_runs import LayoutRun, largest_difference
from rich.console import Console
from safetensors.torch import load_file
from sharded_runs import SMALL, batch_of
from trainer_runs import settings_file

from shared.course.errors import CourseError
from shared.data.loader import StatefulLoader
from shared.data.rows import Row
from shared.parallel.comm.communicator import CommunicationError
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, layout_name, parse_layout
from shared.parallel.processes.torchrun import ProcessCommunicator
from shared.trainer.config import DataConfig, TrainerConfig
from shared.trainer.launch import elastic
from shared.trainer.records import history
from shared.trainer.run import require_one_folder, train_model
from shared.trainer.settings import parse_words


def elastic_config(layout: str, batch_size: int = 16, **sections) -> TrainerConfig:
    data = DataConfig(batch_size=batch_size, micro_batch_size=1)
    return TrainerConfig(parallel=parse_layout(layout, ParallelConfig()), data=data, elastic=True, **sections)


@pytest.mark.parametrize(
    ("configured", "ranks", "chosen"),
    [
        ("dp4", 4, "dp4"), ("dp4", 3, "dp3"), ("dp4", 1, "one"), ("dp4", 6, "dp6"), ("one", 3, "dp3"),
        ("fsdp4", 3, "fsdp3"), ("fsdp4", 8, "fsdp8"), ("fsdp2", 1, "one"),
        ("dp2_fsdp2", 6, "dp3_fsdp2"), ("dp2_fsdp2", 3, "fsdp3"), ("dp2_fsdp2", 2, "fsdp2"), ("dp2_fsdp2", 1, "one"),
        ("dp2_zero1", 3, "dp3_zero1"), ("dp2_zero1", 1, "one"),
        ("dp2_tp2", 3, "tp2"), ("dp2_tp2", 7, "dp3_tp2"), ("dp2_tp2_sp", 2, "tp2_sp"), ("pp2_dp2", 5, "pp2_dp2"), ("dp2_cp2", 6, "dp3_cp2"),
    ],
)  # fmt: skip
def test_data_axes_take_the_ranks_that_are_there_and_the_others_stay(configured, ranks, chosen):
    fit = elastic.fitted(elastic_config(configured), ranks)
    assert layout_name(fit.parallel) == chosen and fit.parallel.ranks <= ranks and fit.data == elastic_config(configured).data


def test_too_few_ranks_for_a_replica_have_no_layout_and_more_than_rows_stay_idle():
    assert elastic.fitted(elastic_config("dp2_tp2"), 1) is None and elastic.fitted(elastic_config("dp2_tp2_pp2"), 3) is None
    assert elastic.fitted(elastic_config("dp2", batch_size=4), 9).parallel.ranks == 4


def test_what_the_settings_refuse_is_not_chosen():
    """Interleaved stages take a multiple of the stages as micro-batches: of 16 rows on 3 replicas each has 6, and on 5 there would be 4."""
    config = elastic_config("pp2_dp4")
    interleaved = replace(config.parallel, pipeline_schedule="interleaved", pipeline_chunks=2)
    model = replace(config.model, num_hidden_layers=4)
    config = replace(config, parallel=interleaved, model=model, data=replace(config.data, batch_size=15))
    assert [elastic.fitted(config, 2 * replicas).parallel.data_parallel for replicas in (4, 3, 2)] == [4, 2, 2]


def test_uneven_shares_are_refused_without_elastic():
    with pytest.raises(ValueError, match="cannot be shared equally among 3 ranks"):
        replace(elastic_config("dp3"), elastic=False)


class Rows:
    """Endless rows for `LayoutRun`, of which some hold few targets."""

    seq = 11

    def settings(self):
        return {}

    def initial_state(self):
        return 0

    def next_indices(self, position, count):
        return list(range(position, position + count)), position + count

    def row(self, index):
        return Row({name: rows[index % 12] for name, rows in batch_of(index // 12, 0, SMALL).items()}, 0)

    def padding(self):
        return {"input_ids": torch.zeros(11, dtype=torch.int64), "targets": torch.full((11,), -100)}


class LoadedRun(LayoutRun):
    def __init__(self, world, layout):
        super().__init__(world, layout)
        data = self.mesh.data
        self.loader = StatefulLoader(Rows(), batch_size=14, micro_batch_size=4, rank=data.rank, ranks=data.size, prefetch=0)

    def shares(self):
        return next(iter(self.loader))

    def state_dict(self):
        return super().state_dict() | {"loader": self.loader.state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loader.load_state_dict(state["loader"])


@pytest.mark.parametrize("configured", ["dp4_zero1", "dp2_fsdp2"])
def test_the_weights_are_those_of_an_undisturbed_run_in_float64(configured, tmp_path):
    """14 rows on 4 ranks, on 3, on one and on 5: no number divides them but 1."""

    def part(world, layout, go_on):
        run = LoadedRun(world, layout)
        if go_on:
            run.restore(tmp_path)
        run.train(5).save(tmp_path)
        return run.weights()

    for number, ranks in enumerate((4, 3, 1, 5)):
        layout = elastic.fitted(elastic_config(configured, 14), ranks).parallel
        (found, *_) = run_threads(part, ranks, layout, number > 0)
    (whole,) = run_threads(lambda world: LoadedRun(world, ParallelConfig()).train(20).weights(), 1)
    assert largest_difference(found, whole) < 1e-12


def test_a_machine_that_goes_is_done_without_and_one_that_comes_is_taken_in(tmp_path):
    """Two ranks, one, two; the machine that goes is the one whose rank 0 holds the ranks' own store."""
    file = settings_file(
        tmp_path, tmp_path / "prepared", model={"hidden_dropout": 0.0}, steps=20, data={"batch_size": 7, "micro_batch_size": 1},
        optimizer={"name": "adamw", "lr": 0.001}, report={"completions": 0, "prompts": [], "export": True},
        parallel={"data_parallel": 2, "heartbeat_timeout": 5.0}, engine={"evaluate_every": 0, "checkpoint": {"every": 3}},
    )  # fmt: skip
    words = [str(file), f"engine.output={tmp_path / 'whole'}", "parallel.data_parallel=1"]
    train_model(parse_words(TrainerConfig, words), Console(quiet=True))  # prepares the text as well
    with ElasticRun(tmp_path / "run", [str(file)]) as run:
        for step in (10, 14):  # the checkpoint of step 6 is complete before that of step 9 begins
            (run.output / f"gate-{step}").touch()
        agents = [run.start(), run.start()]
        run.wait_for(lambda events: starts(events)[-1:] == [2])
        run.wait_at(10)
        run.kill(run.agent_of_rank(0, agents))
        (run.output / "gate-10").unlink()
        run.wait_for(lambda events: starts(events)[-1] == 1)
        run.wait_at(14)
        run.start()
        events = run.wait_for(lambda events: events[-1]["event"] == "end")
        assert starts(events)[-3:] == [2, 1, 2] and "The report:" in run.said(), run.said()
    found, whole = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole"))
    assert largest_difference(found, whole) < 1e-6
    *_, first, alone, again = history.eras(tmp_path / "run")
    assert (first.layout, alone.layout, again.layout) == ("dp2", "one", "dp2")
    assert "left: 1 rank of" in alone.change and alone.step >= 6
    assert "joined: 1 rank of" in again.change and "asked to leave (SIGTERM)" in again.change and (again.step, again.lost) == (14, 0)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Ranks that left and joined" in page and page.count("1 rank of") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["course", "torch"])
def test_ranks_and_machines_that_are_killed_at_random_moments_change_no_weights(backend, tmp_path):
    """A slice of the table of chapters/12_grpo/ELASTIC.md."""
    found = [found for _, _, found in elastic_kills.rows(3, 3, 1, [backend], tmp_path)]
    assert sum(each.kills.total() for each in found) == 3 and all(each.difference < 1e-6 for each in found)
    assert all(each.said > 1 for each in found), "the report names nobody"


def test_the_history_shows_who_left_and_what_was_lost_and_bears_a_cut_line(tmp_path):
    assert history.eras(tmp_path) == []
    start = {"event": "start", "layout": "dp4", "ranks": 4, "idle": 0, "time": "then"}
    events = [
        start | {"step": 0, "there": {"a": 2, "b": 2}},
        {"event": "stop", "step": 19, "rank": 1, "reason": "rank 3 has sent no heartbeat; its last operation was x"},
        {"event": "stop", "step": 18, "rank": 0, "reason": "rank 1 stopped"},
        start | {"step": 15, "there": {"a": 2}, "layout": "dp2", "ranks": 2},
        start | {"step": 15, "there": {"a": 2, "<c>": 1}, "layout": "dp2", "ranks": 2, "idle": 1},
    ]
    (tmp_path / history.FILE).write_text("\n".join(map(json.dumps, events)) + '\n{"event": "st')
    _, second, third = history.eras(tmp_path)
    assert second[1:] == (15, "dp2", 2, 0, 4, "left: 2 ranks of b; rank 3 has sent no heartbeat")
    assert third[1:] == (15, "dp2", 2, 1, 0, "joined: 1 rank of <c>") and history.names(Counter(a=2)) == "2 ranks of a"
    assert not history.has_ended(tmp_path)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (RuntimeError("running the callback: [gloo/transport/tcp/pair.cc:537] Read error"), "rank 2 has sent no heartbeat"),
        (RuntimeError("another error"), "another error"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_the_history_names_the_rank_that_left_where_torch_names_a_socket(tmp_path, error, kept):
    world = Mock(spec=ProcessCommunicator, rank=1, size=2, process=Mock())
    world.process.heartbeat.connection_error.return_value = CommunicationError("rank 2 has sent no heartbeat")
    config = elastic_config("dp2")
    config = replace(config, engine=replace(config.engine, output=tmp_path))
    history.History(config, world).on_error(Mock(step=7), error)
    [event] = history.events_of(tmp_path)
    assert (event["reason"], event["step"], event["rank"]) == (kept, 7, 1)


def test_machines_without_a_common_folder_are_refused():
    world = Mock(size=2)
    require_one_folder(elastic_config("dp2"), [0, 1], world)
    with pytest.raises(CourseError, match="is not one folder for all ranks"):
        require_one_folder(elastic_config("dp2"), [0], world)


def saves(config: TrainerConfig, *steps: int):
    for step in steps:
        (Path(config.engine.output) / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)


def test_one_machine_starts_again_with_fewer_ranks_where_it_fails_without_a_new_checkpoint(tmp_path):
    """It saves in the first and the third start: a kill, two kills without a save, a hanging rank, then the end."""
    config = elastic_config("dp2_tp2")
    config = replace(config, engine=replace(config.engine, output=tmp_path, device="cpu"))
    codes, told = iter([137, 137, 75, 0]), []

    def start(ranks):
        told.append(ranks)
        if len(told) in (1, 3):
            saves(config, len(told))
        return next(codes)

    assert elastic.keep_running(config, start) == 0 and told == [4, 4, 2, 2]


@pytest.mark.parametrize("code", [0, 1, 2, 130, 143])
def test_one_machine_does_not_start_again_what_was_asked_to_leave_or_would_fail_again(tmp_path, code):
    config = elastic_config("dp2")
    start = Mock(return_value=code)
    assert elastic.keep_running(replace(config, engine=replace(config.engine, output=tmp_path)), start) == code
    start.assert_called_once_with(2)
