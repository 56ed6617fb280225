"""What `make run LAYOUT=...` starts: the command of a layout, refusals before anything starts, and what torchrun's failures say."""

import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from trainer_runs import TINY, TRAIN, settings_file, train

from shared.course.errors import CourseError
from shared.course.launch import refuse
from shared.trainer.config import TrainerConfig
from shared.trainer.launch import start
from shared.trainer.settings import parse_text

LAPTOP = TRAIN.with_name("laptop.yaml")


def test_the_last_thing_that_torchrun_prints_of_a_refused_run_is_the_sentence(tmp_path):
    words = ["data.prepare.sources=[{path: nowhere.txt}]", "parallel.data_parallel=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    command = [*torchrun, str(TRAIN), str(settings_file(tmp_path, tmp_path))]
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    sentence = "nowhere.txt does not exist: give an existing file or folder, or the name of a hub dataset."
    assert done.returncode == 1 and f"traceback : {sentence}" in done.stderr.split("Root Cause")[1]


def test_a_refused_setting_is_left_for_torchrun_as_well(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        refuse(CourseError("There is no setting stepps."))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert failure.message == "There is no setting stepps."


@pytest.mark.parametrize(
    "layout, words, sentence",
    [
        ("dp2x", ["a.yaml"], "The layout 'dp2x' is not understood"),
        ("dp3_ep2", ["a.yaml"], "expert_parallel is 2, which does not divide the 3 data-parallel ranks"),
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
    assert "parallel.expert_parallel=2" in start.command_of("dp2_ep2", [str(file)])[0]
    torch, _ = start.command_of("fsdp2", [str(file), "parallel.backend=torch"])
    assert f"engine.output={tmp_path / 'run-fsdp2-torch'}" in torch


@pytest.mark.parametrize(
    "layout, words, size",
    [
        ("pp2", [], "2"),  # 8 rows in a step: 4 micro-batches for 2 stages
        ("pp2_dp2", [], "1"),  # 4 rows on each replica
        ("dp2", [], None),
        ("pp2", ["data.micro_batch_size=8"], None),
        ("pp2", ["data={batch_size: 8, micro_batch_size: 8}"], None),
        ("pp2", ["data.batch_size=64"], None),  # has 8 already
    ],
)
def test_a_pipeline_gets_twice_as_many_micro_batches_as_stages_unless_the_words_say_otherwise(layout, words, size, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: {LAPTOP}\nengine: {{output: {tmp_path / 'run'}}}\n")  # 8 rows in a step, at once
    command, _ = start.command_of(layout, [str(file), *words])
    words = command[command.index(str(TRAIN)) + 1 :]
    added = [f"data.micro_batch_size={size}"] if size else []
    assert start.with_microbatches(words) == words + added
    assert (f"data.micro_batch_size is {size} here and not 8" in capsys.readouterr().out) == bool(size)


@pytest.mark.parametrize("below", [False, True])
def test_a_size_that_the_users_file_or_one_below_it_names_stays_and_a_line_says_what_it_costs(below, tmp_path, capsys):
    file = settings_file(tmp_path, tmp_path / "prepared", data={"batch_size": 8, "micro_batch_size": 4})
    if below:
        file = tmp_path / "mine.yaml"
        file.write_text("extends: tiny.yaml\n")
    words = [str(file), "parallel.pipeline_parallel=2"]
    assert start.with_microbatches(words) == words
    said = f"stays 4, as {file} says: 2 stages have 2 micro-batches in a step, and with data.micro_batch_size=2 4, where they wait less"
    assert said in capsys.readouterr().out
    (tmp_path / "over.yaml").write_text(f"extends: {LAPTOP}\ndata: {{seq: 64}}\n")  # the course's own file names 8
    words[0] = str(tmp_path / "over.yaml")
    assert start.with_microbatches(words) == [*words, "data.micro_batch_size=2"]


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
    monkeypatch.setattr("shared.trainer.run.train_model", Mock(side_effect=error))
    monkeypatch.setattr("shared.parallel.processes.torchrun.from_torchrun", Mock(return_value=(None, None)))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(sys, "argv", [str(TRAIN), str(settings_file(tmp_path, tmp_path / "prepared"))])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(TRAIN), run_name="__main__")
    assert left.value.code == ("\nsomething is wrong" if speaks else 1)


def test_how_long_ranks_wait_for_one_that_prepares_text_is_the_configurations(tmp_path, monkeypatch):
    """Text for the shipped run on two cards takes hours, and the other ranks wait for it in one operation."""
    joining = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("shared.parallel.processes.torchrun.from_torchrun", joining)
    words = [str(settings_file(tmp_path, tmp_path / "prepared")), "parallel.collective_timeout=7200", "parallel.heartbeat_timeout=20"]
    words.append("parallel.init_timeout=900")
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(TRAIN))["main"](words)
    joining.assert_called_once_with(20.0, "cpu", 7200.0, 900.0)


def test_a_batch_that_cannot_be_shared_equally_is_refused():
    spread_over = lambda ranks: parse_text(TrainerConfig, json.dumps(TINY | {"parallel": {"data_parallel": ranks}}))
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
