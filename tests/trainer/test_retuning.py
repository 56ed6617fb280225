"""Extend and retune a run as its user does: what is taken, refused or asked for, the history, kills, and `continue_from`."""

import json
import shutil

import pytest
import torch
from preferring_runs import preferring_config
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import settings_file, train
from tuned_runs import base_run, tuned_config

from shared.course.errors import CourseError
from shared.engine.checkpoint.folder import Checkpoints
from shared.parallel.comm.threads import run_threads
from shared.trainer import history, provenance, retuning
from shared.trainer.config import TrainerConfig
from shared.trainer.retuning import changes_of
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words

QUIET = Console(quiet=True)
PLAIN = {"schedule": {"name": "constant", "warmup_steps": 0}, "report": {"export": False, "completions": 0, "prompts": []}}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_run(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run(tmp_path, prepared):
    """run(folder, *words, **changes) trains there; every step of it is kept."""

    def start(folder, *words, **changes):
        keep = {"engine": {"checkpoint": {"every": 1, "keep_last": 99}, "log_every": 1}}
        path = settings_file(tmp_path / folder, prepared, **PLAIN | keep | changes)
        return train_model(parse_words(TrainerConfig, [str(path), *words]), QUIET)

    return start


def weights_at(folder, step: int) -> dict[str, torch.Tensor]:
    """And the optimizer's state."""
    folder = Checkpoints(folder / "checkpoints").path(step)
    return load_file(folder / "weights.safetensors") | load_file(folder / "optimizer.safetensors")


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_with_a_constant_rate_an_extended_run_is_the_long_one_bit_for_bit(tmp_path, run):
    """With dropout: random numbers, the place in the data and the optimizer's state are all carried over."""
    run("long", "steps=8")
    run("run", "steps=4")
    results = run("run", "steps=8", "continue_with=steps")
    assert equal(weights_at(tmp_path / "long/run", 8), weights_at(tmp_path / "run/run", 8))
    assert [(change.step, change.settings) for change in results.changes] == [(4, {"steps": [4, 8]})]


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear"])
def test_where_the_schedule_has_an_end_the_extended_run_differs_by_the_decay_that_it_made_and_the_long_one_did_not(tmp_path, run, name):
    """The steps before differ where cosine's and linear's decay depends on the length; wsd's begins late, and a run that is continued from
    before it is the long one bit for bit."""
    schedule = {"schedule": {"name": name, "warmup_steps": 1, "decay_steps": 2}}
    run("long", "steps=8", **schedule)
    run("run", "steps=4", **schedule)
    short, rates = rates_of(tmp_path / "run/run"), rates_of(tmp_path / "long/run")
    run("run", "steps=8", "continue_with=steps", **schedule)
    extended = rates_of(tmp_path / "run/run")
    assert {step: rate for step, rate in extended.items() if step > 4} == {step: rate for step, rate in rates.items() if step > 4}
    assert {step: rate for step, rate in extended.items() if step <= 4} == short
    same = [step for step in short if short[step] == rates[step]]
    assert same == {"wsd": [1, 2], "cosine": [1], "linear": [1]}[name]
    assert not equal(weights_at(tmp_path / "long/run", 8), weights_at(tmp_path / "run/run", 8))
    before = tmp_path / "run/run/checkpoints" / f"step-{same[-1]:08d}"
    run("before", "steps=8", f"continue_from={before}", "continue_with=steps", **schedule)
    assert equal(weights_at(tmp_path / "long/run", 8), weights_at(tmp_path / "before/run", 8))


def rates_of(folder) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: next(value for name, value in row.items() if name.startswith("learning_rate")) for row in rows}


def test_an_extended_run_that_is_killed_resumes_bit_for_bit_with_and_without_the_words(tmp_path, run):
    changed = {"optimizer": {"lr": 0.01, "name": "adamw"}, "data": {"micro_batch_size": 1}}
    run("run", "steps=4")
    run("whole", "steps=4")
    words = ["steps=8", "continue_with=steps,optimizer"]
    run("whole", *words, **changed)
    for after, again in ((4, words), (6, ["steps=8"])):
        run("run", *(words if after == 4 else again), **changed)
        for step in Checkpoints(tmp_path / "run/run/checkpoints").steps():  # as if killed after this step, without its report
            if step > after:
                shutil.rmtree(Checkpoints(tmp_path / "run/run/checkpoints").path(step))
        results = run("run", *again, **changed)
        assert equal(weights_at(tmp_path / "whole/run", 8), weights_at(tmp_path / "run/run", 8))
        assert [change.step for change in results.changes] == [4], "recorded once"
        assert provenance.saved_value(tmp_path / "run/run", "continue_with") == [], "the words hold for one command"


def test_a_kill_between_the_history_and_the_record_writes_the_change_once(tmp_path, run):
    run("run", "steps=4")
    record = (tmp_path / "run/run/config.yaml").read_bytes()
    run("run", "steps=6", "continue_with=steps")
    for step in (5, 6):
        shutil.rmtree(Checkpoints(tmp_path / "run/run/checkpoints").path(step))
    (tmp_path / "run/run/config.yaml").write_bytes(record)
    results = run("run", "steps=6", "continue_with=steps")
    assert len(history.events_of(tmp_path / "run/run")) == 2 and len(results.changes) == 1


REFUSED = {  # words -> what the sentence names, and the words that allow it; None where nothing does
    "steps=8": ("steps (4 there, 8 here)", "steps"),
    "optimizer.lr=0.01": ("optimizer.lr (0.02 there, 0.01 here)", "optimizer.lr"),
    "optimizer.name=adamw": ("optimizer.name ('muon' there, 'adamw' here)", "optimizer.name"),
    "schedule.warmup_steps=2": ("schedule.warmup_steps (0 there, 2 here)", "schedule.warmup_steps"),
    "schedule.name=cosine": ("schedule.name ('constant' there, 'cosine' here)", "schedule.name"),
    "data.batch_size=8": ("data.batch_size (4 there, 8 here)", "data.batch_size"),
    "data.seq=64": ("data.seq (96 there, 64 here)", "data.seq"),
    "data.fim.rate=0.25": ("data.fim.rate (0.5 there, 0.25 here)", "data.fim.rate"),
    "max_grad_norm=0.5": ("max_grad_norm (1.0 there, 0.5 here)", "max_grad_norm"),
    "precision=bfloat16": ("precision ('float32' there, 'bfloat16' here)", "precision"),
    "seed=1": ("seed (0 there, 1 here)", "seed"),
    "model.hidden_dropout=0.0": ("model.hidden_dropout (0.1 there, 0.0 here)", "model.hidden_dropout"),
    "model.hidden_size=64": ("model.hidden_size (32 there, 64 here)", None),
    "model.tie_word_embeddings=true": ("model.tie_word_embeddings (False there, True here)", None),
}  # fmt: skip


@pytest.fixture(scope="module")
def short(tmp_path_factory, prepared):
    folder = tmp_path_factory.mktemp("short")
    path = settings_file(folder, prepared, **PLAIN | {"steps": 4})
    train_model(parse_words(TrainerConfig, [str(path)]), QUIET)
    return folder


def copied(short, folder, prepared, *words):
    """The short run in another folder, with other words."""
    shutil.copytree(short / "run", folder / "run")
    return parse_words(TrainerConfig, [str(settings_file(folder, prepared, **PLAIN | {"steps": 4})), *words])


@pytest.mark.parametrize("word", REFUSED)
def test_what_changes_a_run_is_refused_with_both_values_and_the_words_and_then_taken(tmp_path, prepared, short, word):
    named, allowed = REFUSED[word]
    words = [word] if word.startswith("steps") else [word, "steps=6"]
    with pytest.raises(CourseError) as refused:
        train_model(copied(short, tmp_path / "refused", prepared, *words), QUIET)
    before = provenance.read_record(tmp_path / "refused/run/config.yaml")
    assert before == provenance.read_record(short / "run/config.yaml") | {"engine": before["engine"]}, "nothing was recorded"
    if allowed is None:
        key = word.split("=")[0]
        assert named in str(refused.value) and f"Within a run {key} cannot change" in str(refused.value)
        words.append(f"continue_with=steps,{key.split('.')[0]}")
        with pytest.raises(CourseError, match="cannot change"):
            train_model(copied(short, tmp_path / "asked", prepared, *words), QUIET)
        return
    asked = ",".join(sorted({allowed, "steps"}))
    assert named in str(refused.value) and f"continue_with={asked} to continue it" in str(refused.value)
    results = train_model(copied(short, tmp_path / "taken", prepared, *words, f"continue_with={asked}"), QUIET)
    [change] = results.changes
    assert change.step == 4 and sorted(change.settings) == sorted({allowed, "steps"})
    page = (tmp_path / "taken/run/report.html").read_text()
    assert "Changes on the way" in page and f"<td>{allowed}</td>" in page
    again = copied(tmp_path / "taken", tmp_path / "again", prepared, *words)
    assert train_model(again, QUIET).changes == results.changes, "and the same settings then need no words"


def test_first_weights_that_were_trained_further_since_are_named_by_their_places_and_not_by_their_fingerprints(tmp_path):
    before = {"start_from": "runs/sft", "start": "80e15427"}
    after = {"start_from": "runs/sft", "start": "83f69dc5"}
    judged = {"ppo": {"reward_model": "r"}}
    for more, named in (({}, "start_from=runs/sft"), (judged, "start_from=runs/sft or ppo.reward_model=r")):
        with pytest.raises(CourseError, match=f"run began with other weights than {named} has now.*name a copy of what") as refused:
            retuning.require_allowed(before | more, after | more, tmp_path / "run", [])
        assert "80e1" not in str(refused.value)
    with pytest.raises(CourseError, match="Within a run mode, start cannot change"):
        retuning.require_allowed(before | {"mode": "sft"}, after | {"mode": "dpo"}, tmp_path / "run", [])


def test_only_what_is_named_is_taken(tmp_path, prepared, short):
    with pytest.raises(CourseError, match=r"configuration: seed \(0 there, 1 here\)\. .*continue_with=seed,steps to"):
        train_model(copied(short, tmp_path, prepared, "steps=6", "seed=1", "continue_with=steps"), QUIET)
    with pytest.raises(SystemExit):
        copied(short, tmp_path / "typo", prepared, "continue_with=[stepps]")


def test_a_setting_takes_effect_after_the_step_and_a_smaller_batch_takes_the_next_rows(tmp_path, prepared, short, capsys):
    words = ["steps=8", "optimizer.lr=0.005", "data.batch_size=2", "continue_with=steps,optimizer.lr,data.batch_size", "engine.log_every=1"]
    train_model(copied(short, tmp_path, prepared, *words), Console(width=200))
    said = capsys.readouterr().out
    assert "Continued after step 4 with data.batch_size 2 (4 before), optimizer.lr 0.005 (0.02 before), steps 8 (4 before)." in said
    assert "The optimizer's lr is 0.005 and was 0.02." in said
    assert "The schedule goes on at its step 5 of 8, with the learning rate 0.005; that of step 4 was 0.02." in said
    assert {step: rate for step, rate in rates_of(tmp_path / "run").items() if step > 4} == dict.fromkeys(range(5, 9), 0.005)
    position = json.loads((tmp_path / "run/checkpoints/step-00000008/state.json").read_text())["parts"]["loader"]["sample"]
    assert position == 4 * 4 + 4 * 2


def test_what_changes_rounding_or_speed_alone_is_taken_with_a_line(tmp_path, prepared, short, capsys):
    words = [
        "data.micro_batch_size=1", "parallel.activation_checkpointing=full", "engine.checkpoint.every=3", "engine.trackers=[console]",
        "model.attention=eager", "data.prepare.workers=1",
    ]  # fmt: skip
    train_model(copied(short, tmp_path, prepared, *words), Console(width=400))
    said = capsys.readouterr().out
    assert "data.micro_batch_size 1 (2 before)" in said and "parallel.activation_checkpointing full (none before)" in said
    assert "rounding, speed or what is watched, not the run, but for the numbers that dropout draws." in said
    assert not changes_of(tmp_path / "run")


def test_a_change_that_nothing_would_be_trained_with_is_refused(tmp_path, prepared, short):
    with pytest.raises(CourseError, match="has trained 4 steps, so optimizer.lr would change nothing: give more steps"):
        train_model(copied(short, tmp_path / "a", prepared, "optimizer.lr=0.01", "continue_with=optimizer"), QUIET)
    with pytest.raises(CourseError, match="steps is 2, and .* has trained 4 steps"):
        train_model(copied(short, tmp_path / "b", prepared, "steps=2", "continue_with=steps"), QUIET)


def test_text_of_another_tokenizer_is_refused_with_the_words_that_keep_the_runs_own(tmp_path, prepared, short):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(f"Sentence {number} of another text, which is long enough to be kept.\n" * 40)
    other = [f"data.prepare.sources=[{{path: {text}}}]", "steps=6"]
    with pytest.raises(CourseError, match="continue_with=data.prepare.sources,steps"):
        train_model(copied(short, tmp_path / "a", prepared, *other), QUIET)
    with pytest.raises(CourseError, match="another tokenizer than the text now gives.*data.prepare.tokenizer=.*run/tokenizer"):
        train_model(copied(short, tmp_path / "b", prepared, *other, "continue_with=steps,data"), QUIET)
    words = [*other, f"data.prepare.tokenizer={tmp_path / 'c/run/tokenizer'}", "continue_with=steps,data"]
    results = train_model(copied(short, tmp_path / "c", prepared, *words), QUIET)
    assert any("The loader begins at its start" in remark for remark in results.changes[0].remarks)


# continue_from.


def test_a_run_is_continued_whole_in_another_folder_and_the_first_stays_as_it_is(tmp_path, prepared, short):
    files = {path: path.read_bytes() for path in short.rglob("*") if path.is_file()}
    path = settings_file(tmp_path, prepared, **PLAIN | {"steps": 8})
    words = [str(path), f"continue_from={short / 'run'}", "continue_with=steps"]
    train_model(parse_words(TrainerConfig, words), QUIET)
    shutil.copytree(short / "run", tmp_path / "there/run")
    there = settings_file(tmp_path / "there", prepared, **PLAIN | {"steps": 8})
    train_model(parse_words(TrainerConfig, [str(there), "continue_with=steps"]), QUIET)
    assert equal(weights_at(tmp_path / "run", 8), weights_at(tmp_path / "there/run", 8))
    assert {path: path.read_bytes() for path in short.rglob("*") if path.is_file()} == files
    copied, resumed = changes_of(tmp_path / "run")
    assert copied.source.endswith("step-00000004") and resumed.settings == {"steps": [4, 8]}
    assert sorted(rates_of(tmp_path / "run")) == sorted(rates_of(tmp_path / "there/run")), "the curves begin at step 1"
    train_model(parse_words(TrainerConfig, words), QUIET)  # the same command resumes
    train_model(parse_words(TrainerConfig, [str(path)]), QUIET)
    with pytest.raises(CourseError, match="holds a run that was not continued from"):
        train_model(parse_words(TrainerConfig, [str(path), f"continue_from={tmp_path / 'there/run'}"]), QUIET)


def test_a_run_cannot_be_continued_from_nothing_from_damage_or_otherwise_than_asked(tmp_path, prepared, short):
    def start(source, *words):
        path = settings_file(tmp_path / "new", prepared, **PLAIN | {"steps": 4})
        train_model(parse_words(TrainerConfig, [str(path), f"continue_from={source}", *words]), QUIET)

    with pytest.raises(CourseError, match="continue_from is .*, which is no run with a checkpoint"):
        start(tmp_path / "nowhere")
    with pytest.raises(CourseError, match=r"steps \(4 there, 8 here\).*continue_with=steps"):
        start(short / "run", "steps=8")
    shutil.copytree(short / "run", tmp_path / "damaged")
    newest = tmp_path / "damaged/checkpoints/step-00000004"
    (newest / "weights.safetensors").write_bytes(b"")
    with pytest.raises(CourseError, match="step-00000004 is damaged"):
        start(newest)
    assert not (tmp_path / "new/run/checkpoints").exists()
    start(tmp_path / "damaged")
    assert changes_of(tmp_path / "new/run")[0].source.endswith("step-00000003"), "the newest that is intact"


def test_a_copy_has_runs_of_its_own_in_trackers(tmp_path, prepared):
    path = settings_file(tmp_path / "one", prepared, **PLAIN | {"steps": 2})
    words = ["engine.trackers=[mlflow]", f"engine.mlflow_uri=sqlite:///{tmp_path / 'mlflow.db'}"]
    train_model(parse_words(TrainerConfig, [str(path), *words]), QUIET)
    other = settings_file(tmp_path / "other", prepared, **PLAIN | {"steps": 4})
    train_model(parse_words(TrainerConfig, [str(other), *words, f"continue_from={tmp_path / 'one/run'}", "continue_with=steps"]), QUIET)
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(found) == 2 and {each.info.status for each in found} == {"FINISHED"}


# Every mode, every layout, the command line.


MODES = {"sft": [], "reward": [], "dpo": ["dpo.beta=0.3"], "ppo": ["ppo.clip=0.3"], "grpo": ["grpo.clip_high=0.3"]}


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[] if mode == "ppo" else pytest.mark.slow) for mode in MODES])
def test_every_mode_is_extended_bit_for_bit_retuned_and_continued_elsewhere(tmp_path, base, mode):
    """A rollout is open at step 3 of ppo and grpo: the extended run goes on within it."""
    still = ["schedule.name=constant", "schedule.warmup_steps=0", "engine.checkpoint.every=1", "engine.checkpoint.keep_last=99"]

    def config(folder, *words):
        words = (*still, *words)
        return tuned_config(tmp_path / folder, base, *words) if mode == "sft" else preferring_config(tmp_path / folder, base, mode, *words)

    train_model(config("long", "steps=6"), QUIET)
    train_model(config("run", "steps=3"), QUIET)
    shutil.copytree(tmp_path / "run/run", tmp_path / "retuned/run")
    with pytest.raises(CourseError, match="continue_with=steps"):
        train_model(config("run", "steps=6"), QUIET)
    train_model(config("run", "steps=6", "continue_with=steps"), QUIET)
    assert equal(weights_at(tmp_path / "long/run", 6), weights_at(tmp_path / "run/run", 6))
    names = ",".join(["steps", "optimizer.lr", *(word.split("=")[0] for word in MODES[mode])])
    train_model(config("retuned", "steps=6", "optimizer.lr=0.01", *MODES[mode], f"continue_with={names}"), QUIET)
    assert not equal(weights_at(tmp_path / "long/run", 6), weights_at(tmp_path / "retuned/run", 6))
    source = tmp_path / "run/run/checkpoints/step-00000003"
    train_model(config("copy", "steps=6", f"continue_from={source}", "continue_with=steps"), QUIET)
    assert equal(weights_at(tmp_path / "long/run", 6), weights_at(tmp_path / "copy/run", 6))


def test_a_run_is_extended_and_retuned_in_another_layout(tmp_path, prepared):
    """On two ranks from one process's checkpoint, and back, without dropout: what one process trains, but for rounding."""
    still = {**PLAIN, "model": {"hidden_dropout": 0.0}, "optimizer": {"name": "sgd", "lr": 0.2}}

    def config(folder, *words):
        path = settings_file(tmp_path / folder, prepared, **still)
        return parse_words(TrainerConfig, [str(path), "engine.checkpoint.every=1", *words])

    later = ["steps=4", "optimizer.lr=0.1", "continue_with=steps,optimizer.lr"]
    train_model(config("alone", "steps=2"), QUIET)
    shutil.copytree(tmp_path / "alone/run", tmp_path / "two/run")
    train_model(config("alone", *later), QUIET)
    two = config("two", *later, "parallel.fully_sharded=2")
    run_threads(lambda world: train_model(two, QUIET, world), 2)
    assert [change.settings.keys() for change in changes_of(tmp_path / "two/run")] == [{"optimizer.lr", "steps"}]
    for folder in ("alone", "two"):  # whole files, by one process that goes one step further
        train_model(config(folder, "steps=5", "optimizer.lr=0.1", "continue_with=steps"), QUIET)
    one, other = (load_file(tmp_path / folder / "run/checkpoints/step-00000005/weights.safetensors") for folder in ("alone", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-6)


def test_the_words_work_from_the_command_line(tmp_path, prepared):
    path = settings_file(tmp_path, prepared, **PLAIN)
    assert train(path, "steps=2").returncode == 0
    refused = train(path, "steps=3")
    assert refused.returncode == 1 and "steps (2 there, 3 here)" in refused.stderr and "Traceback" not in refused.stderr
    done = train(path, "steps=3", "continue_with=steps")
    assert done.returncode == 0 and "Continued after step 2 with steps 3 (2 before)." in done.stdout, done.stderr
