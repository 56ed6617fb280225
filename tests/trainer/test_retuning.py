"""Retune a run: what a resumed run takes, refuses or takes when asked, with both values, the words that allow it and its history."""

import json

import pytest
from retuned_runs import QUIET, copied, rates_of
from rich.console import Console

from shared.course.errors import CourseError
from shared.trainer import provenance
from shared.trainer.records import changes
from shared.trainer.records.history import changes_of
from shared.trainer.run import train_model


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
        with pytest.raises(CourseError, match=f"run began with other weights than {named} has now.*the model of step N again") as refused:
            changes.require_allowed(before | more, after | more, tmp_path / "run", [])
        assert "80e1" not in str(refused.value)
    with pytest.raises(CourseError, match="Within a run mode, start cannot change"):
        changes.require_allowed(before | {"mode": "sft"}, after | {"mode": "dpo"}, tmp_path / "run", [])


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
