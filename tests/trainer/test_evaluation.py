"""`course eval`: figures with errors, pairs of models, tasks in YAML, drawn answers of a chat model, and sentences for what is no task."""

import json
import math

import numpy as np
import pytest
import scipy.stats
import torch
from click.testing import CliRunner
from evaluated_models import TEXT, model_folder, write_records
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shared.course.cli import cli
from shared.rl import examination
from shared.trainer.evaluation import command, measures
from shared.trainer.evaluation.command import evaluate_run
from shared.trainer.evaluation.measures import Measured, open_subject, plain_prompt
from shared.trainer.evaluation.tasks import load_task

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|turn_end|>{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHOICE = "kind: choice\nprompt: '{{ q }}'\nchoices: options\nanswer: label\n"
FRUIT = {"q": "the quick", "options": ["brown fox", "lazy dog"], "label": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"), "llama", positions=96)


def course_eval(*words):
    return CliRunner().invoke(cli, ["eval", *map(str, words)])


def task_file(folder, text, records=None, name="mine"):
    if records is not None:
        write_records(folder / f"{name}.jsonl", records)
        text = f"data: {{path: {name}.jsonl}}\n{text}"
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def test_standard_errors_and_paired_differences_are_scipys():
    draw = np.random.default_rng(0)
    mine, theirs, sizes = draw.normal(1, 2, 60), draw.normal(2, 1, 60), draw.uniform(50, 300, 60)
    difference = Measured(list(mine)).minus(Measured(list(theirs)))
    test = scipy.stats.ttest_rel(mine, theirs)
    assert difference.mean / difference.error == pytest.approx(test.statistic, rel=1e-9)
    nats = sizes * draw.normal(1, 0.2, 60)
    ratio = lambda values, weights, axis=-1: values.sum(axis) / weights.sum(axis)
    drawn = scipy.stats.bootstrap((nats, sizes), ratio, paired=True, n_resamples=4000, vectorized=True, rng=np.random.default_rng(1))
    found = Measured(list(nats), list(sizes))
    assert found.mean == pytest.approx(ratio(nats, sizes)) and found.error == pytest.approx(drawn.standard_error, rel=0.08)
    assert math.isnan(Measured([1.0]).error)


@pytest.mark.parametrize("overlap", [1, 40, 96])
def test_rolling_windows_predict_each_token_once_with_the_context_that_was_asked_for(model, overlap):
    """transformers predicts each token from just the context that the rule gives it."""
    subject = open_subject(model)
    tokens = subject.tokenizer.encode(TEXT)[:150]
    windows = list(subject.scorer.windows(tokens, overlap))
    assert [token for _, predicted in windows for token in predicted] == tokens
    assert all(len(read) >= overlap for read, _ in windows[1:]) and all(len(read) + len(said) <= 97 for read, said in windows)
    theirs = AutoModelForCausalLM.from_pretrained(model)
    total = 0.0
    for read, said in windows:
        logits = theirs(torch.tensor([[*read, *said][:-1]])).logits[0, -len(said) :]
        total += logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None]).sum().item()
    assert subject.scorer.rolling([tokens, tokens[:7]], overlap)[0] == pytest.approx(total, rel=1e-5)


def test_a_continuation_that_merges_into_its_context_keeps_its_last_token(model):
    subject = open_subject(model)
    whole = subject.tokenizer.encode("the quick brown fox jumps")
    assert subject.scorer.split("the quick brown fox ju", "mps") == (whole[:-1], whole[-1:])
    assert subject.scorer.split("   ", "fox") == ([subject.tokenizer.end_id], subject.tokenizer.encode("   fox"))


def test_the_command_prints_a_table_writes_json_and_compares_two_models(model, tmp_path):
    other = model_folder(tmp_path / "other", "gpt2", positions=96)
    text = tmp_path / "notes.txt"
    text.write_text(TEXT)
    task = task_file(tmp_path, CHOICE, [FRUIT, FRUIT | {"label": "lazy dog"}, FRUIT | {"label": "B"}])
    words = ("--task", task, "--data", text, "--device", "cpu")
    done = course_eval(model, *words, "--compare", other, "--output", tmp_path / "kept.json")
    assert done.exit_code == 0, done.output
    for word in ("bits_per_byte", "acc_norm", "acc_bytes", "difference", "95 % interval"):
        assert word in done.output
    kept = json.loads((tmp_path / "kept.json").read_text())["tasks"]
    mine, theirs = (evaluate_run(path, [load_task(task)]).numbers() for path in (model, other))
    assert kept["mine"]["metrics"]["acc"]["value"] == mine["mine/acc"] and mine.keys() == theirs.keys()
    assert kept["notes.txt"]["metrics"]["bits_per_byte"]["error"] is None and len(kept["mine"]["metrics"]["acc"]["items"]) == 3
    alone = course_eval(model, *words)
    assert alone.exit_code == 0 and "±" in alone.output and (model / "eval.json").is_file()


def test_few_shot_examples_are_other_records_and_stay_the_same(tmp_path):
    records = [{"q": f"{number} + 1?", "a": number + 1} for number in range(9)]
    task = task_file(tmp_path, "kind: generate\nprompt: '{{ q }}'\nanswer: a\nshots: 3\ncheck: number\n", records)
    loaded, again = load_task(task), load_task(task)
    assert loaded == again and len({item.shots for item in loaded.items}) == 9
    for number, item in enumerate(loaded.items):
        assert len(set(item.shots)) == 3 and item.prompt not in dict(item.shots)
        assert plain_prompt(loaded.task, item) == "".join(f"{q} {a}\n\n" for q, a in item.shots) + f"{number} + 1?"


def test_drawn_answers_of_a_chat_model_are_judged_and_kept(model, tmp_path):
    folder = model_folder(tmp_path / "chat", "llama", positions=96)
    (folder / "chat_template.jinja").write_text(CHAT)
    subject = open_subject(folder)
    special = subject.tokenizer.special
    ids = subject.chat_prompt([("a", "b")], " the <|user|> ")
    assert [token for token in ids if token in subject.tokenizer.special_ids.values()] == [
        special(name) for name in ("<|user|>", "<|turn_end|>", "<|assistant|>", "<|turn_end|>", "<|user|>", "<|turn_end|>", "<|assistant|>")
    ]
    done = course_eval(folder, "--task", "sum", "--task", "function", "--limit", "2", "--samples", "5")
    assert done.exit_code == 0, done.output
    assert all(f"pass@{k}" in done.output for k in (1, 2, 4)) and "pass@8" not in done.output
    kept = json.loads((folder / "eval.json").read_text())["tasks"]["sum"]
    assert kept["answers"][0]["expected"].isdecimal() and isinstance(kept["answers"][0]["answer"], str)


@pytest.mark.parametrize(("new_tokens", "kept"), [(10, 86), (48, 48), (90, 48), (1000, 48)])
def test_a_long_prompt_keeps_its_end_and_at_least_half_of_the_context(model, new_tokens, kept, monkeypatch):
    read = []
    monkeypatch.setattr(examination, "generate_tokens", lambda model, prompts, *rest, **settings: read.extend(prompts) or iter([]))
    ids = [5 + number % 200 for number in range(300)]
    assert measures.generate(open_subject(model), [ids, ids[:7]], new_tokens) == ["", ""]
    assert read == [ids[-kept:], ids[:7]]


@pytest.mark.parametrize(
    ("text", "records", "says"),
    [
        (CHOICE, [], "holds no records"),
        (CHOICE, [{"q": "x", "options": ["a", "b"]}], "mine.jsonl:1 gives no answer"),
        (CHOICE, [FRUIT | {"options": []}], "at least two texts"),
        (CHOICE, [FRUIT, FRUIT | {"label": 2}], "mine.jsonl:2 has the answer '2', which is none of its 2 choices"),
        (CHOICE, [FRUIT | {"label": -1}], "none of its 2 choices"),
        (CHOICE, [FRUIT | {"q": "\ud800"}], "half a surrogate"),
        (CHOICE, [3], "is not a record"),
        (CHOICE + "shots: 2\n", [FRUIT, FRUIT], "there are 2 records to draw from"),
        ("kind: generate\nprompt: '{{ q }}'\nanswer: none\n", [FRUIT], "has the answer 'None'"),
        ("kind: generate\nprompt: '{{ q '\nanswer: q\n", [FRUIT], "prompt cannot be read as jinja2"),
        ("kind: generate\nprompt: '{{ q.__class__.mro() }}'\nanswer: q\n", [FRUIT], "gives no prompt"),
        ("kind: generate\nprompt: '{{ q }}'\nanswer: q\ncheck: magic\n", [FRUIT], "check is magic"),
        ("kind: choice\nprompt: q\n", [FRUIT], "choices is empty"),
        ("kind: text\nlimits: 3\n", None, "limits"),
    ],
)  # fmt: skip
def test_what_is_no_task_is_a_sentence(tmp_path, text, records, says):
    task = task_file(tmp_path, text)
    if records is not None:
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        task.write_text(f"data: {{path: mine.jsonl}}\n{text}")
    done = course_eval(tmp_path, "--task", task)
    assert done.exit_code == 64 and says in done.output and "Traceback" not in done.output, done.output


def test_a_tilde_is_the_home_folder_in_each_path_of_the_command(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(command, "tasks_of", lambda *words: [])
    monkeypatch.setattr(command, "evaluate_and_show", lambda console, *paths, **opened: seen.extend(paths))
    done = course_eval("~/run", "--compare", "~/other", "--output", "~/kept.json")
    assert done.exit_code == 0 and seen == [tmp_path / "run", [], tmp_path / "other", tmp_path / "kept.json"]


def test_what_is_no_text_and_no_model_is_a_sentence(model, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2" * 40)
    for name in ("empty.txt", "binary.txt"):
        done = course_eval(model, "--data", tmp_path / name)
        assert done.exit_code == 64 and "empty or binary" in done.output
    for words, says in (
        ((tmp_path / "none",), "does not exist"),
        ((model, "--task", "sums"), "There is no task 'sums'"),
        ((model, "--task", "sum", "--task", "sum"), "Two tasks are called sum"),
        ((model, "--lm-eval", "x", "--task", "sum"), "--lm-eval stands alone"),
        ((model, "--chat"), "--chat are for --lm-eval"),
    ):
        done = course_eval(*words)
        assert done.exit_code == 64 and says in done.output, done.output


def test_a_model_that_gives_no_number_is_a_sentence(tmp_path):
    folder = model_folder(tmp_path / "model", "llama", positions=96)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    done = course_eval(folder, "--task", task_file(tmp_path, CHOICE, [FRUIT]))
    assert done.exit_code == 64 and "log-likelihood of nan" in done.output and not (folder / "eval.json").exists()
