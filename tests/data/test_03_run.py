"""Chapter 03's run as a reader uses it: a small real run, what it leaves, and what bad options say."""

import importlib.util
import json
import sys
from pathlib import Path

import datasets

import pytest
from scripts import run_script

from shared import devices
from shared.course.launch import launch
from shared.course.paths import CHECKOUT
from shared.data import hub
from shared.data.completion import Gap, find_gaps

SCRIPT = CHECKOUT / "chapters" / "03_data_pipeline" / "run.py"
SMALL = [
    "--steps", "20", "--evaluate_every", "10", "--model.hidden_size", "32", "--model.num_hidden_layers", "2", "--seq", "64",
    "--batch_size", "8", "--prepare.vocab_size", "400", "--prepare.sentinels", "0", "--middle_tokens", "5", "--gaps", "2",
]  # fmt: skip


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    for i in range(60):
        lines = [f"    total_{i} = total_{(i * 7 + j) % 60} + value_{j * i % 97}\n" for j in range(40)]
        (folder / f"file{i}.py").write_text(f"def function_{i}(value):\n{''.join(lines)}    return total_{i}\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    return folder


@pytest.fixture(scope="module")
def script():
    """run.py as a module, started without the seconds that a process takes."""
    specification = importlib.util.spec_from_file_location("run_of_chapter_03", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def written(folder):
    """When each file was written, without the hashes of sources, which are kept once the sources are ten seconds old."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != "sources.json"}


def test_a_run_prepares_learns_fills_gaps_and_leaves_its_results(tmp_path, raw, script, monkeypatch):
    done = run_script(SCRIPT, *SMALL, "--data", raw, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/03_data_pipeline"
    record = json.loads((folder / "figures.json").read_text())
    losses = [loss for _, loss in record["training"]]
    assert len(losses) == 20 and losses[-1] < 0.8 * losses[0]
    assert [step for step, _ in record["held_out"]] == [10, 20]
    assert len(record["gaps"]) == 2 and all(gap["prefix"] and gap["middle"] and gap["suffix"] for gap in record["gaps"])
    for said in ("Cleaning", "is a binary file", "held-out bits per byte, xz", "the author wrote"):
        assert said in done.stdout
    assert {path.name for path in folder.iterdir()} == {"figures.json", "loss.png", "model.safetensors", "prepared"}
    prepared = written(folder / "prepared")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: None)  # that is for a process of its own
    monkeypatch.setattr(sys, "argv", ["run.py", *SMALL, "--data", str(raw), "--steps", "1", "--fim_rate", "0"])
    launch(script.run, script.RunConfig, SCRIPT.with_name("run.yaml"))
    assert len(json.loads((folder / "figures.json").read_text())["training"]) == 1
    assert written(folder / "prepared") == prepared, "it was prepared already"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prepare.held_out_share", "2"], "held_out_share is 2.0"),
        (["--prepare.cleaning.stages", "[repare]"], "Did you mean 'repair'"),
        (["--seq", "512"], "seq is 512 and model.max_position_embeddings only 256"),
        (["--fim_rate", "1.5"], "rate is 1.5"),
        (["--data", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--prepare.vocab_siz", "500"], "Did you mean 'prepare.vocab_size'"),
        (["--slack", "64"], "slack is 64"),
        (["--prepare.sources", "[{path: nowhere.txt, weight: 2}]"], "the trainer mixes by weight"),
        (["--learning_rate", "-1"], "learning_rate is -1.0: give a number above 0"),
        (["--seed", "-1"], "seed is -1: give at least 0"),
        (["--gaps", "-1"], "gaps is -1: give at least 0"),
    ],
)
def test_a_bad_option_is_one_sentence_before_any_work(tmp_path, monkeypatch, capsys, script, options, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *SMALL, *options])
    with pytest.raises(SystemExit) as ended:
        launch(script.run, script.RunConfig, SCRIPT.with_name("run.yaml"))
    assert said in f"{ended.value} {capsys.readouterr().err}" and ended.value.code not in (0, None)
    assert not list(tmp_path.rglob("*.parquet"))


def launched(script, monkeypatch, folder, *options) -> str:
    """Start the run in this process; the sentence that it ends with."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(sys, "argv", ["run.py", *SMALL, *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        launch(script.run, script.RunConfig, SCRIPT.with_name("run.yaml"))
    return str(ended.value)


def test_a_training_that_diverges_stops_where_it_does(tmp_path, raw, script, monkeypatch):
    said = launched(script, monkeypatch, tmp_path, "--data", raw, "--learning_rate", "1e9")
    assert "The loss is nan at step" in said and "with a smaller learning rate" in said


def test_a_mistyped_data_folder_is_reported_before_the_hub_is_asked(tmp_path, script, monkeypatch, capsys):
    def not_reached(*_, **__):
        assert "There is no file or folder missing_folder here, so it is taken for a dataset" in capsys.readouterr().out.replace("\n", " ")
        raise OSError("Couldn't reach 'missing_folder' on the Hub.")

    monkeypatch.setattr(hub, "ask", lambda source: None)
    monkeypatch.setattr(datasets, "load_dataset", not_reached)
    said = launched(script, monkeypatch, tmp_path, "--data", "missing_folder")
    assert f"on the Hub. There is no file or folder missing_folder in {Path.cwd()} either: check the spelling" in said


def test_another_field_of_a_table_is_given_as_the_message_says(tmp_path, raw, script, monkeypatch):
    (tmp_path / "x.csv").write_text("a\nonly one text, and a short one\n")
    said = launched(script, monkeypatch, tmp_path, "--data", "x.csv")
    assert "text_field: a}]'." in said
    said = launched(script, monkeypatch, tmp_path, "--prepare.sources", "[{path: x.csv, text_field: a}]")
    assert "of 1 document, 0 were kept. Dropped: 1 shorter than 64 bytes (length)" in said


def test_a_gap_is_a_line_of_its_document():
    text = "".join(f"    the line of number {i} of this\n" for i in range(30))

    store = type("Store", (), {"__len__": lambda _: 2, "document": lambda _, number: number})()
    tokenizer = type("Tokenizer", (), {"decode": lambda _, number: text if number else "short\n"})()
    (gap,) = find_gaps(store, tokenizer, 3, seed=0)
    whole = gap.prefix + gap.middle + gap.suffix
    assert isinstance(gap, Gap) and whole in text and gap.prefix.endswith("\n    ") and gap.suffix.startswith("\n")
    assert len(gap.prefix) == 300 and len(gap.suffix) == 150
    assert not gap.right and gap._replace(filled=f" {gap.middle}\n").right
