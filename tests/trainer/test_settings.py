"""What the trainer is told: files that stand on another, words, and a sentence for everything that cannot be."""

from dataclasses import replace

import pytest
import yaml
from rich.console import Console
from trainer_runs import TRAIN, settings_file

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.course.typed import RENAMED, with_words
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel
from shared.optim.config import ScheduleConfig
from shared.parallel.planning.memory import StepSizes, estimate_memory
from shared.trainer.config import TrainerConfig
from shared.trainer.pipeline.stages import read_pipeline
from shared.trainer.records.changes import require_allowed
from shared.trainer.run import train_model
from shared.trainer.settings import parse_text, parse_words, read_settings, with_shorter_schedule


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["optimzer.lr=1"], "Did you mean 'optimizer.lr'?"),
        (["steps=many"], "steps is 'many': give a whole number"),
        (["steps=0"], "steps is 0: give at least 1."),
        (["data.seq=4096"], "data.seq is 4096 and model.max_position_embeddings only 96"),
        (["data.micro_batch_size=3"], "not a multiple of data.micro_batch_size, 3"),
        (["schedule.decay_steps=60"], "warm-up and decay need 61 steps and the run has 6"),
        (["data.strategy=sequential"], "use best_fit"),
        (["data.held_out_rows=0"], "data.held_out_rows is 0"),
        (["seed=-1"], "seed is -1"),
        (["report.top_k=0"], "report.top_k is 0"),
        (["faster"], "'faster' is not a setting: write key=value"),
        (["engine.trackers=[consol]"], "Did you mean 'console'"),
        (["model.architecture=encoder"], "needs a decoder"),
        (["seed=9223372036854775808"], "give less than 2**63"),
        (["data.epochs=0"], "data.epochs is 0: give at least 1, or null"),
        (["engine.early_stopping=2", "engine.evaluate_every=0"], "early_stopping counts evaluations, and evaluate_every is 0"),
        (["parallel.heartbeat_timeout=.inf"], "parallel.heartbeat_timeout is inf: give a finite number"),
        (["data.prepare.sources=[{path: x, limit: 0}]"], "data.prepare.sources[0].limit is 0: give at least 1, or null."),
        (["parallel.recompute=blocks"], "parallel.recompute is an older name: write parallel.activation_checkpointing"),
        (["parallel.activation_checkpointing=blocks"], "parallel.activation_checkpointing blocks is an older name: write full."),
        (["model.attention=naive"], "model.attention naive is an older name: write eager."),
        (["model.attention=fused"], "write sdpa."),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path, prepared, capsys, words, sentence):
    with pytest.raises(SystemExit) as left:
        parse_words(TrainerConfig, [str(settings_file(tmp_path, prepared)), *words])
    assert left.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "words", "lengths", "told"),
    [
        ("wsd", ["steps=20"], (1, 5), ["20 of 260 steps: schedule.warmup_steps 20 becomes 1, schedule.decay_steps 65 becomes 5."]),
        ("wsd", ["steps=84"], (6, 21), ["84 of 260 steps: schedule.warmup_steps 20 becomes 6, schedule.decay_steps 65 becomes 21."]),
        ("wsd", ["steps=85"], (20, 65), []),
        ("wsd", ["steps=520"], (20, 65), []),
        ("cosine", ["steps=20"], (1, 65), ["20 of 260 steps: schedule.warmup_steps 20 becomes 1."]),
        ("cosine", ["steps=21"], (20, 65), []),
        ("constant", ["steps=2"], (20, 65), []),
    ],
)
def test_warm_up_and_decay_shrink_with_a_run_that_words_shorten(tmp_path, prepared, name, words, lengths, told):
    schedule, said = {"name": name, "warmup_steps": 20, "decay_steps": 65}, []
    config = parse_words(TrainerConfig, [str(settings_file(tmp_path, prepared, steps=260, schedule=schedule)), *words], said.append)
    assert ((config.schedule.warmup_steps, config.schedule.decay_steps), said) == (lengths, told)


RUNS = sorted(path for kind in ("laptop", "two_3090s") for path in (CHECKOUT / "chapters" / "12_grpo").glob(f"{kind}*.yaml"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_that_is_shipped_is_shortened_by_one_word(path):
    """In every mode; the model that it starts from need not be there."""
    written = read_settings(path)
    for steps in (1, 7, 20, written["steps"] - 1):
        settings = with_words(TrainerConfig, written, {"steps": str(steps)})
        schedule = with_shorter_schedule(TrainerConfig, written, settings, ["steps"])["schedule"]
        assert ScheduleConfig(**schedule | {"steps": steps}).name == written["schedule"]["name"]


def test_the_pipeline_that_is_shipped_is_shortened_by_one_word(tmp_path):
    for words in (["steps=7"], ["stages.sft.steps=7"]):
        stages = read_pipeline(CHECKOUT / "chapters/12_grpo/pipelines/laptop.yaml", [*words, f"output={tmp_path}"]).stages
        assert {stage.config.steps for stage in stages if words == ["steps=7"] or stage.name == "sft"} == {7}


def test_a_schedule_that_the_file_leaves_to_the_defaults_shrinks_too(tmp_path, prepared):
    path, said = settings_file(tmp_path, prepared), []
    settings = yaml.safe_load(path.read_text())
    del settings["schedule"], settings["steps"]
    path.write_text(yaml.safe_dump(settings))
    assert parse_words(TrainerConfig, [str(path), "steps=20"], said.append).schedule.warmup_steps == 1
    assert said == ["20 of 1000 steps: schedule.warmup_steps 50 becomes 1."]


def test_a_schedule_that_words_give_is_not_shrunk(tmp_path, prepared, capsys):
    path = settings_file(tmp_path, prepared, steps=260, schedule={"name": "wsd", "warmup_steps": 20, "decay_steps": 65})
    with pytest.raises(SystemExit):
        parse_words(TrainerConfig, [str(path), "steps=20", "schedule.decay_steps=10"])
    assert "warm-up and decay need 30 steps and the run has 20" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"optimizer": {"to_adamw": ["nothing*"]}}, "nothing"),
        ({"model": {"position": "alibi"}}, "No known format can describe this model"),
        ({"steps": 5000, "data": {"epochs": 2}}, "data.epochs is 2, which gives .* rows, enough for .* steps of 4, and steps is 5,000"),
    ],
)
def test_what_only_the_model_shows_is_refused_before_the_first_step(tmp_path, prepared, words, sentence):
    config = parse_words(TrainerConfig, [str(settings_file(tmp_path, prepared, **words))])
    with pytest.raises(CourseError, match=sentence):
        train_model(config, Console(quiet=True))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_damaged_record_is_named(tmp_path, prepared):
    path = settings_file(tmp_path, prepared)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("")
    with pytest.raises(CourseError, match="config.yaml is damaged"):
        train_model(parse_words(TrainerConfig, [str(path)]), Console(quiet=True))


def test_the_shipped_configurations_can_be_read(tmp_path):
    """A run that starts from a model that is not there yet gets another one."""
    files = sorted([*TRAIN.parent.glob("laptop*.yaml"), *TRAIN.parent.glob("two_3090s*.yaml")])  # run.yaml belongs to run.py
    assert files
    save_pretrained(TransformerModel(ModelConfig(hidden_size=32, num_hidden_layers=2, max_position_embeddings=2048)), tmp_path)
    for path in files:
        settings = read_settings(path)
        parse_text(TrainerConfig, yaml.safe_dump(settings | ({"start_from": str(tmp_path)} if "start_from" in settings else {})))


def test_the_configuration_for_two_cards_of_24_gigabytes_fits():
    """By the formulas, which tests/parallel/test_memory_estimate.py holds to measurements; CUDA and its libraries take 1 GB more."""
    config = parse_text(TrainerConfig, yaml.safe_dump(read_settings(TRAIN.parent / "two_3090s.yaml")))
    data, layout = config.data, config.parallel
    model = replace(config.model, vocab_size=data.prepare.vocab_size)
    share = data.batch_size // layout.ranks
    step = StepSizes(data.micro_batch_size, data.seq, share // data.micro_batch_size, config.precision)
    needs = estimate_memory(model, layout, config.optimizer, step, packed=True)
    assert layout.ranks == 2 and share % data.micro_batch_size == 0
    assert 4e9 < needs.total < 18e9, f"{needs.total / 1e9:.1f} GB"


@pytest.mark.parametrize("section, key", [("engine", "output"), ("model", "hidden_size"), ("report", "prompts")])
def test_a_null_in_a_file_is_refused_where_a_value_is_needed(tmp_path, prepared, capsys, section, key):
    with pytest.raises(SystemExit):
        parse_words(TrainerConfig, [str(settings_file(tmp_path, prepared, **{section: {key: None}}))])
    assert f"{section}.{key} is null: give " in " ".join(capsys.readouterr().err.split())


def test_a_section_of_the_file_is_left_out_by_a_null_on_the_command_line(tmp_path, prepared):
    file = str(settings_file(tmp_path, prepared))
    assert parse_words(TrainerConfig, [file]).model.hidden_size == 32
    words = ["model=null", "model.num_hidden_layers=1"]
    assert parse_words(TrainerConfig, [file, *words]).model == replace(TrainerConfig().model, num_hidden_layers=1)


def test_a_section_that_is_left_empty_changes_nothing(tmp_path, prepared):
    settings_file(tmp_path, prepared)
    (tmp_path / "above.yaml").write_text("extends: tiny.yaml\nengine:\n#  log_every: 5\ndata:\n  fim:\n")
    below, above = (parse_words(TrainerConfig, [str(tmp_path / name)]) for name in ("tiny.yaml", "above.yaml"))
    assert above == below and above.engine.log_every == 2


def test_a_tilde_is_the_home_folder(tmp_path, prepared, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [str(settings_file(tmp_path, prepared)), "engine.output=~/run", "data.prepared=~/prepared"]
    config = parse_words(TrainerConfig, words)
    assert (config.engine.output, config.data.prepared) == (tmp_path / "run", tmp_path / "prepared")


def test_a_configuration_file_extends_another(tmp_path):
    (tmp_path / "below.yaml").write_text("steps: 7\nmodel: {hidden_size: 64, num_hidden_layers: 2}\nengine: {trackers: [console, jsonl]}\n")
    (tmp_path / "above.yaml").write_text("extends: below.yaml\nmodel: {hidden_size: 32}\nengine: {trackers: [jsonl]}\n")
    assert read_settings(tmp_path / "above.yaml") == {
        "steps": 7, "model": {"hidden_size": 32, "num_hidden_layers": 2}, "engine": {"trackers": ["jsonl"]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("extends: a.yaml", "extends itself"),
        ("extends: b.yaml", "no configuration .*b.yaml, which a.yaml extends"),
        ("extends: [b.yaml, c.yaml]", "give the name of one file"),
        ("steps: 6\nschedule: {steps: 9}", "the schedule's steps are the run's: give steps"),
        ("schedule: {steps: 9}", "the schedule's steps are the run's: give steps"),
        ("- 1", "holds no keys"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, sentence):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(CourseError, match=sentence):
        read_settings(tmp_path / "a.yaml")


def test_every_renamed_key_is_refused_with_its_name_now(tmp_path, capsys):
    """In a file as well; and each new name is a key."""
    for old, new in RENAMED.items():
        *sections, last = old.split(".")
        record = {last: 1}
        for section in reversed(sections):
            record = {section: record}
        (tmp_path / "old.yaml").write_text(yaml.safe_dump(record))
        with pytest.raises(SystemExit):
            parse_words(TrainerConfig, [str(tmp_path / "old.yaml")])
        assert f"{old} is an older name: write {new}." in " ".join(capsys.readouterr().err.split())
        here = TrainerConfig()
        for name in new.split(" ")[0].split("."):
            here = getattr(here, name)


def test_files_that_extend_each_other_in_a_ring_are_refused(tmp_path):
    for name, below in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {below}.yaml\nsteps: 1\n")
    with pytest.raises(CourseError, match="a.yaml extends itself, by way of a.yaml, b.yaml, c.yaml"):
        read_settings(tmp_path / "a.yaml")


def test_keys_that_a_record_no_longer_has_differ_and_free_ones_do_not(tmp_path):
    saved = {"seed": 0, "engine": {"log_every": 1}, "data": {"prepared": "a", "prepare": {"vocab_size": 512}}, "gone": 7}
    assert require_allowed(saved, saved | {"engine": {"log_every": 2}}, tmp_path, []) == {}
    now = {name: value for name, value in saved.items() if name != "gone"} | {"data": {"prepared": "b", "prepare": {"vocab_size": 300}}}
    differing = r"another configuration: data\.prepare\.vocab_size \(512 there, 300 here\), gone \(7 there, None here\)\. "
    with pytest.raises(CourseError, match=differing + "Within a run gone cannot change"):
        require_allowed(saved, now, tmp_path, [])


def test_a_setting_that_came_after_a_run_leaves_it_resumable_where_it_is_the_default(tmp_path):
    """The record of an older trainer lacks `stop_words`; with others the run would be another."""
    now = {"data": {"prepare": {"cleaning": {"text": "prose", "stop_words": ["en"]}}}}
    saved = {"data": {"prepare": {"cleaning": {"text": "prose"}}}}
    assert require_allowed(saved, now, tmp_path, []) == {}
    now["data"]["prepare"]["cleaning"]["stop_words"] = ["de"]
    with pytest.raises(CourseError, match=r"cleaning\.stop_words \(None there, \['de'\] here\)"):
        require_allowed(saved, now, tmp_path, [])


def test_a_run_of_another_length_is_refused_by_the_key_that_can_be_given(tmp_path):
    """The schedule's steps are the run's, and refused as a word."""
    saved, now = ({"steps": steps, "schedule": {"steps": steps}} for steps in (4, 8))
    with pytest.raises(CourseError, match=r"another configuration: steps \(4 there, 8 here\)\. .*continue_with=steps to continue it"):
        require_allowed(saved, now, tmp_path, [])
