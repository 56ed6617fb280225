"""The trainer on two ranks: the same run as on one, by `make run LAYOUT=...`; refusals before anything starts; another layout resumes."""

import json
import logging
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from threading import get_ident
from unittest.mock import Mock

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from trainer_runs import TINY, TRAIN, settings_file, train

from shared.course.errors import CourseError
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.trainer import start
from shared.trainer.config import TrainerConfig
from shared.trainer.pretrain import build
from shared.trainer.settings import parse_text, parse_words

TIMEOUT = 600


def spread(layout: str, *words) -> subprocess.CompletedProcess:
    command, _ = start.command_of(layout, [str(word) for word in words])
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same settings on one process, and on two, whose folder is `run-fsdp2`. Dropout draws on each rank by itself, so there is none."""
    folder = tmp_path_factory.mktemp("layouts")
    file = settings_file(folder, folder / "prepared", model={"hidden_dropout": 0.0, "num_key_value_heads": 2}, report={"completions": 0})
    alone, together = train(file), spread("fsdp2", file)
    assert alone.returncode == 0, alone.stderr
    assert together.returncode == 0, together.stderr
    return folder, file, together.stdout


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert (weight - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


def test_two_ranks_train_the_model_of_one(runs):
    folder, _, said = runs
    assert_same(weights(folder / "run-fsdp2"), weights(folder / "run"))
    summary = json.loads((folder / "run-fsdp2" / "results.json").read_text())["summary"]
    alone = json.loads((folder / "run" / "results.json").read_text())["summary"]
    assert summary["held-out bits per byte"] == pytest.approx(alone["held-out bits per byte"], rel=1e-4)
    assert summary["training tokens"] == alone["training tokens"] == 6 * 4 * 96
    differences = {name: value for name, value in summary.items() if "difference" in name}
    assert len(differences) == 3 and all(value < 1e-4 for value in differences.values())
    assert "2 ranks, layout fsdp2, backend course." in said and said.count("The report:") == 1
    assert {"all_gather over fsdp, a step", "reduce_scatter over fsdp, a step"} <= summary.keys()


def test_one_process_resumes_the_checkpoint_of_two_ranks(runs, tmp_path):
    folder, file, _ = runs
    left = shutil.copytree(folder / "run-fsdp2", tmp_path / "left")
    (newest,) = [path for path in (left / "checkpoints").iterdir() if path.name == "step-00000006"]
    shutil.rmtree(newest)
    done = train(file, f"engine.output={left}")
    assert done.returncode == 0 and "Going on from step 4" in done.stdout, done.stderr
    assert_same(weights(left), weights(folder / "run"))


def forget_after(step: int, run):
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


@pytest.mark.slow
def test_four_ranks_then_two_on_torchs_engine_then_one_end_as_one_process(runs):
    folder, file, _ = runs
    words = [file, f"engine.output={folder / 'handed-on'}", "engine.checkpoint.keep_last=9"]
    first = spread("dp2_fsdp2", *words)
    assert first.returncode == 0, first.stderr
    forget_after(2, folder / "handed-on")
    second = spread("fsdp2", *words, "parallel.backend=torch")
    assert second.returncode == 0 and "Going on from step 2" in second.stdout, second.stderr
    forget_after(4, folder / "handed-on")
    third = train(*words)
    assert third.returncode == 0 and "Going on from step 4" in third.stdout, third.stderr
    assert_same(weights(folder / "handed-on"), weights(folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "dp2_zero1", "fsdp2", "tp2"])
def test_torchs_engine_trains_the_model_of_one_process(runs, layout):
    folder, file, _ = runs
    done = spread(layout, file, "parallel.backend=torch")
    assert done.returncode == 0 and f"layout {layout}, backend torch." in done.stdout, done.stderr
    assert_same(weights(folder / f"run-{layout}-torch"), weights(folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2_sp"])
def test_the_report_shows_what_tensor_parallelism_sends_and_should_send(runs, layout):
    folder, file, _ = runs
    done = spread(layout, file)
    assert done.returncode == 0, done.stderr
    assert_same(weights(folder / f"run-{layout}"), weights(folder / "run"))
    summary = json.loads((folder / f"run-{layout}" / "results.json").read_text())["summary"]
    predicted = {name.removesuffix(", by formula"): value for name, value in summary.items() if name.endswith(", by formula")}
    measured = {name.removesuffix(", a step"): value for name, value in summary.items() if name.endswith("over tp, a step")}
    assert predicted == measured and "all_reduce over tp" in measured


@pytest.mark.slow
@pytest.mark.parametrize("layout, ranks", [("cp2", 2), ("dp2_cp2", 4)])
def test_ranks_that_share_the_sequence_train_the_model_of_one_process(runs, layout, ranks):
    folder, file, _ = runs
    done = spread(layout, file)
    assert done.returncode == 0 and f"{ranks} ranks, layout {layout}, backend course." in done.stdout, done.stderr
    assert_same(weights(folder / f"run-{layout}"), weights(folder / "run"))
    summary, alone = (json.loads((folder / name / "results.json").read_text())["summary"] for name in (f"run-{layout}", "run"))
    assert summary["held-out bits per byte"] == pytest.approx(alone["held-out bits per byte"], rel=1e-4)
    assert summary["held-out next tokens guessed right"] == pytest.approx(alone["held-out next tokens guessed right"], abs=1e-3)
    assert summary["training tokens"] == alone["training tokens"]
    assert {"send over cp, a step", "receive over cp, a step", "all_reduce over loss, a step"} <= summary.keys()


@pytest.mark.slow
@pytest.mark.parametrize("layout, seeds", [("cp2", [0, 1]), ("dp2_cp2", [0, 1, 2, 3]), ("cp2_tp2", [0, 0, 1, 1])])
def test_ranks_with_other_rows_or_positions_draw_other_dropout(runs, tmp_path, monkeypatch, layout, seeds):
    _, file, _ = runs
    told, inner = {}, torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (told.setdefault(get_ident(), seed), inner(seed))[1])

    def work(world):
        config = parse_words(TrainerConfig, [str(file), f"engine.output={tmp_path / str(world.rank)}"])
        build(replace(config, parallel=parse_layout(layout)), Console(quiet=True), world)
        return told[get_ident()]

    assert run_threads(work, len(seeds)) == seeds


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed_and_it_ends_as_one_process(runs):
    """Rank 1 is killed as soon as step 2 is saved; a step takes longer than finding that out, since a rank compares replicas in each."""
    folder, file, _ = runs
    words = [str(file), f"engine.output={folder / 'killed'}", "engine.log_every=1", "parallel.heartbeat_timeout=5"]
    command, _ = start.command_of("dp2", words)
    command[command.index("--standalone")] = "--max-restarts=1"
    rest = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    run = subprocess.Popen(command, **rest)
    saved = folder / "killed" / "checkpoints" / "step-00000002"
    deadline = time.monotonic() + TIMEOUT
    while not saved.exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.01)
    ranks = [child for child in psutil.Process(run.pid).children() if "train.py" in " ".join(child.cmdline())]
    ranks[-1].kill()
    said, _ = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 0 and "Going on from step" in said, said
    assert_same(weights(folder / "killed"), weights(folder / "run"))


@pytest.mark.parametrize(
    "layout, words, sentence",
    [
        ("dp2x", ["a.yaml"], "The layout 'dp2x' is not understood"),
        ("dp2_ep2", ["a.yaml"], "it comes with chapter 09"),
        ("dp2_zero2", ["a.yaml", "parallel.backend=torch"], "PyTorch has no such engine"),
        ("cp2", ["a.yaml", "parallel.backend=torch"], "context_parallel with backend torch is not built"),
        ("dp2", ["steps=3"], "Give a configuration"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(layout, words, sentence):
    with pytest.raises(CourseError, match=sentence):
        start.command_of(layout, words)


def test_a_layout_gets_a_folder_and_as_many_processes_as_it_needs(tmp_path):
    file = settings_file(tmp_path, tmp_path / "prepared")
    command, ranks = start.command_of("dp2_zero1", [str(file)])
    assert ranks == 2 and command[:2] == [sys.executable, "-m"] and command[command.index("--nproc-per-node") + 1] == "2"
    assert f"engine.output={tmp_path / 'run-dp2_zero1'}" in command and "parallel.zero=1" in command
    assert start.command_of("one", [str(file)])[1] == 1
    torch, _ = start.command_of("fsdp2", [str(file), "parallel.backend=torch"])
    assert f"engine.output={tmp_path / 'run-fsdp2-torch'}" in torch


def test_a_layouts_folder_has_the_name_that_the_report_looks_for_and_the_files_backend(tmp_path):
    file = settings_file(tmp_path, tmp_path / "prepared", parallel={"backend": "torch"})
    for word in ("zero1_dp2", "dp2_fsdp1_zero1"):
        command, _ = start.command_of(word, [str(file)])
        assert f"engine.output={tmp_path / 'run-dp2_zero1-torch'}" in command
    with pytest.raises(CourseError, match="PyTorch has no such engine"):
        start.command_of("dp2_zero2", [str(file)])


def test_sequence_parallelism_is_part_of_the_word_or_of_the_settings(tmp_path):
    file = settings_file(tmp_path, tmp_path / "prepared")
    for word, more in (("tp2_sp", []), ("tp2", ["parallel.sequence_parallel=true"])):
        command, ranks = start.command_of(word, [str(file), *more])
        assert ranks == 2 and f"engine.output={tmp_path / 'run-tp2_sp'}" in command and command[-2] == "parallel.sequence_parallel=True"
    assert "parallel.sequence_parallel=False" in start.command_of("tp2", [str(file)])[0]
    with pytest.raises(CourseError, match="LAYOUT tp2_sp means parallel.sequence_parallel=True, and the command line gives False"):
        start.command_of("tp2_sp", [str(file), "parallel.sequence_parallel=false"])
    with pytest.raises(CourseError, match="needs tensor parallelism"):
        start.command_of("dp2", [str(file), "parallel.sequence_parallel=true"])


@pytest.mark.parametrize(
    ("layout", "words", "sentence"),
    [
        ("dp2", ["optimzer.lr=1"], "Did you mean 'optimizer.lr'?"),
        ("dp3", [], "cannot be shared equally among 3 ranks"),
        ("dp2_zero3", [], "parallel.zero"),
        ("dp2", ["parallel.backend=mpi"], "parallel.backend"),
    ],
)
def test_settings_that_cannot_be_are_refused_once_and_before_anything_starts(tmp_path, capsys, monkeypatch, layout, words, sentence):
    monkeypatch.setattr(start, "torchrun", lambda words: pytest.fail("ranks were started"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as left:
        start.main([layout, str(settings_file(tmp_path, tmp_path / "prepared")), *words])
    assert left.value.code == 2 and capsys.readouterr().err.count(sentence) == 1


@pytest.mark.parametrize(("exitcode", "code"), [(75, 75), (-9, 137)])
def test_torchrun_adds_no_traceback_to_a_failed_ranks_message(monkeypatch, exitcode, code):
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=exitcode, error_file="<N/A>")
    monkeypatch.setattr(run, "main", Mock(side_effect=ChildFailedError("train.py", {1: failure})))
    assert start.torchrun([]) == code


def test_ctrl_c_is_the_ranks_to_answer_and_has_the_code_of_one_process(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(run, "main", Mock(side_effect=SignalException("told", signal.SIGINT)))
    assert start.torchrun([]) == 130
    assert int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 60, "a step and its save may take longer than torchrun's half minute"


def test_torchruns_own_warnings_of_a_signal_are_not_shown_and_its_errors_are(monkeypatch, caplog):
    def main(words):
        logger = logging.getLogger("torch.distributed.elastic.agent.server.api")
        logger.warning("Sending process 7 closing signal SIGINT")
        logger.error("failed")
        raise SignalException("told", signal.SIGINT)

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(run, "main", main)
    assert start.torchrun([]) == 130 and [record.message for record in caplog.records] == ["failed"]
    logging.getLogger("afterwards").warning("shown")
    assert caplog.records[-1].message == "shown"


@pytest.mark.slow
def test_ctrl_c_of_two_ranks_shows_no_lines_of_torchrun_and_the_same_command_goes_on(tmp_path):
    file = settings_file(tmp_path, tmp_path / "prepared", engine={"log_every": 1, "evaluate_every": 0}, report={"completions": 0})
    words = [sys.executable, "-m", "shared.trainer.start", "dp2", str(file), "steps=100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    running = subprocess.Popen(words, start_new_session=True, **pipes)
    while "step" not in running.stdout.readline().split():
        assert running.poll() is None
    second = subprocess.run(words, **pipes, timeout=TIMEOUT)
    assert second.returncode == 1 and "run-dp2 is in use by process" in second.stderr and "(job " in second.stderr
    assert second.stderr.count("is in use by") == 1 and "Traceback" not in second.stderr, second.stderr
    os.killpg(running.pid, signal.SIGINT)
    said, errors = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130 and "The same command resumes from step" in said and not errors.strip(), errors


def test_a_rank_without_a_gpu_of_its_own_says_so_whichever_it_is(tmp_path):
    file = settings_file(tmp_path, tmp_path / "prepared", engine={"device": "cuda"}, parallel={"data_parallel": 2})
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = train(file, **place)
    assert done.returncode == 1 and "Rank 1 of this machine has no GPU of its own" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("on_all_ranks", "local_rank", "speaks"), [(True, "0", True), (True, "3", False), (False, "0", True), (False, "3", True)]
)
def test_one_rank_of_each_machine_says_what_all_know_and_any_rank_what_it_alone_knows(
    tmp_path, monkeypatch, on_all_ranks, local_rank, speaks
):
    error = CourseError("something is wrong")
    error.on_all_ranks = on_all_ranks
    monkeypatch.setattr("shared.trainer.pretrain.pretrain", Mock(side_effect=error))
    monkeypatch.setattr("shared.parallel.comm.processes.from_torchrun", Mock(return_value=(None, None)))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(sys, "argv", [str(TRAIN), str(settings_file(tmp_path, tmp_path / "prepared"))])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(TRAIN), run_name="__main__")
    assert left.value.code == ("\nsomething is wrong" if speaks else 1)


def test_how_long_ranks_wait_for_one_that_prepares_text_is_the_configurations(tmp_path, monkeypatch):
    """Text for the shipped run on two cards takes hours, and the other ranks wait for it in one operation."""
    joining = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("shared.parallel.comm.processes.from_torchrun", joining)
    words = [str(settings_file(tmp_path, tmp_path / "prepared")), "parallel.collective_timeout=7200", "parallel.heartbeat_timeout=20"]
    words.append("parallel.init_timeout=900")
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(TRAIN))["main"](words)
    joining.assert_called_once_with(20.0, "cpu", 7200.0, 900.0)


def test_a_batch_that_cannot_be_shared_equally_is_refused():
    spread_over = lambda ranks: parse_text(TrainerConfig, json.dumps(TINY | {"parallel": {"data_parallel": ranks}}))  # noqa: E731
    assert spread_over(2).parallel.ranks == 2
    with pytest.raises(CourseError, match="data.batch_size is 4 and cannot be shared equally among 3 ranks"):
        spread_over(3)


@pytest.mark.parametrize(
    "parallel, changes, sentence",
    [
        ({"context_parallel": 5}, {}, r"A row \(data.seq\) has 96 positions, .* into 10 equal chunks.*: give 90 or 100, or other ranks"),
        ({"context_parallel": 2}, {"attention_dropout": 0.1}, "model.attention_dropout is 0.1, and the ring draws no dropout"),
        ({"context_parallel": 2}, {"position": "relative"}, "model.position is relative"),
        (
            {"context_parallel": 3, "tensor_parallel": 5, "sequence_parallel": True}, {"num_attention_heads": 5, "head_dim": 2,
            "intermediate_size": 60}, "which parallel.sequence_parallel cuts over 5 ranks in each of 3 shares: give a multiple of 15",
        ),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_shared_out_are_refused_with_the_settings(parallel, changes, sentence):
    settings = TINY | {"parallel": parallel, "model": TINY["model"] | changes}
    with pytest.raises(CourseError, match=sentence):
        parse_text(TrainerConfig, json.dumps(settings))


def test_too_few_processes_are_refused(tmp_path):
    done = train(settings_file(tmp_path, tmp_path / "prepared"), "parallel.data_parallel=2")
    assert done.returncode == 1 and "This layout needs 2 ranks" in done.stderr and "Traceback" not in done.stderr
