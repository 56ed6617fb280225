"""Pairs and single answers from files of every kind and shape; what is none is refused by its place; one rule cuts both answers."""

import csv
import json
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.course.errors import CourseError, SettingError
from shared.course.typed import configured
from shared.finetune.chat.datasets import ChatSource
from shared.finetune.chat.encoding import Example
from shared.preference.config import PreferenceConfig
from shared.preference.datasets import open_preferences_of, preference_of
from shared.preference.prepare import PreferenceReport, count, cut_to_row, open_preferences, prepare_preferences
from tests.support import chat_templates as published

ASKED = {"role": "user", "content": "What is two plus two?"}
GOOD, BAD = {"role": "assistant", "content": "It is four."}, {"role": "assistant", "content": "It is five."}
TEXT = {"prompt": ASKED["content"], "chosen": GOOD["content"], "rejected": BAD["content"]}
RECORDS = {
    "text": TEXT,
    "conversational": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "messages, prompt text": {"prompt": ASKED["content"], "chosen": [GOOD], "rejected": [BAD]},
    "one message": {"prompt": [ASKED], "chosen": GOOD, "rejected": BAD},
    "implicit": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "repeated prompt": {"prompt": ASKED["content"], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "null prompt": {"prompt": None, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "JSON": {"prompt": json.dumps([ASKED]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
    "ShareGPT": {
        "prompt": [{"from": "human", "value": ASKED["content"]}],
        "chosen": {"from": "gpt", "value": GOOD["content"]},
        "rejected": {"from": "gpt", "value": BAD["content"]},
    },
    "turns": {
        name: f"\n\nHuman: {ASKED['content']}\n\nAssistant: {answer['content']}" for name, answer in (("chosen", GOOD), ("rejected", BAD))
    },
    "turns, prompt": {"prompt": f"\n\nHuman: {ASKED['content']}\n\nAssistant:", "chosen": GOOD["content"], "rejected": BAD["content"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return published.save_tokenizer(tmp_path_factory.mktemp("model"))


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def config_of(model, *paths, **options):
    return PreferenceConfig(sources=tuple(ChatSource(str(path)) for path in paths), tokenizer=model, **options)


def pairs(count, **more):
    return [{"prompt": f"What is {n}?", "chosen": f"I think that it is {n}.", "rejected": f"No {n}."} | more for n in range(count)]


def contents(preference):
    return [([m["content"] for m in one.messages], one.first) for one in preference.answers]


@pytest.mark.parametrize("shape", RECORDS)
def test_each_shape_gives_the_same_prompt_and_answers(shape):
    found = preference_of(RECORDS[shape], "a.jsonl:1")
    assert contents(found) == [([ASKED["content"], said["content"]], 1) for said in (GOOD, BAD)]
    assert found.value == 0 and found.with_system("Be brief.").answers[1].first == 2
    assert found.answers[0].prompt_digest() == found.answers[1].prompt_digest()


def test_an_implicit_prompt_is_found_on_the_border_of_messages_not_of_words():
    """Both answers begin with the same words, which belong to the answers; earlier answers belong to the prompt."""
    talk = [ASKED, GOOD, {**ASKED, "content": "Sure?"}]
    found = preference_of({"chosen": [*talk, GOOD], "rejected": [*talk, BAD]}, "a.jsonl:1")
    assert contents(found) == [([*(m["content"] for m in talk), said["content"]], 3) for said in (GOOD, BAD)]
    tools = [{"role": "tool", "content": "4"}]
    long = preference_of({"chosen": [ASKED, GOOD, *tools, GOOD], "rejected": [ASKED, BAD]}, "a.jsonl:1")
    assert [len(one.messages) for one in long.answers] == [4, 2] and {one.first for one in long.answers} == {1}


def test_text_that_only_looks_like_json_or_turns_stays_text():
    for text in ("[1, 2]", '["a"]', "12", '{"a": 1}', "He said\n\nHuman: no", "[{}]"):
        found = preference_of(TEXT | {"chosen": text}, "a.jsonl:1")
        assert contents(found)[0] == ([ASKED["content"], text], 1)


@pytest.mark.parametrize(("given", "value"), [(None, 0), (2, 2), (0.5, 0.5), ("1.5", 1.5)])
def test_margins(given, value):
    assert preference_of(TEXT | {"margin": given}, "a.jsonl:1").value == value


@pytest.mark.parametrize(("label", "value"), [(True, 1), (False, 0), (1, 1), ("false", 0), ("True", 1), (0.0, 0)])
def test_single_answers(label, value):
    found = preference_of({"prompt": ASKED["content"], "completion": GOOD["content"], "label": label}, "a.jsonl:1")
    assert contents(found) == [([ASKED["content"], GOOD["content"]], 1)] and found.value == value


@pytest.mark.parametrize("shape", ["conversational", "implicit"])
def test_prompts_are_those_that_trl_extracts(shape):
    """On conversations; on texts TRL takes the common characters for the prompt, and with them the beginning of both answers."""
    from trl.data_utils import maybe_extract_prompt

    wanted = maybe_extract_prompt(RECORDS[shape])
    found = preference_of(RECORDS[shape], "a.jsonl:1")
    assert [one.messages for one in found.answers] == [wanted["prompt"] + wanted[name] for name in ("chosen", "rejected")]
    assert {one.first for one in found.answers} == {len(wanted["prompt"])}


def test_files_of_every_kind_give_the_same_pairs(tmp_path):
    records = [RECORDS["implicit"], {"chosen": [ASKED, BAD], "rejected": [ASKED, {**GOOD, "content": "No, äöü."}]}]
    written(tmp_path / "a.jsonl", records)
    (tmp_path / "b.json").write_text(json.dumps(records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    with open(tmp_path / "d.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["prompt", "chosen", "rejected", "margin"])
        table.writeheader()
        table.writerows({"margin": 0, **{name: json.dumps(value) for name, value in record.items()}} for record in records)
    import datasets

    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    wanted = [contents(preference_of(record, "")) for record in records]
    for name in ("a.jsonl", "b.json", "c.parquet", "d.csv", "saved"):
        found = list(open_preferences_of(ChatSource(str(tmp_path / name))))
        assert [contents(one) for one in found] == wanted, name
        assert [one.place for one in found] == [f"{name}:1", f"{name}:2"]
    assert len(list(open_preferences_of(ChatSource(str(tmp_path / "a.jsonl"), limit=1)))) == 1
    written((tmp_path / "repository").mkdir() or tmp_path / "repository" / "train.jsonl", records)  # what the hub's library loads
    found = open_preferences_of(ChatSource(str(tmp_path / "repository"), kind="hub"))
    assert [contents(one) for one in found] == wanted


MEND = "mend or remove it"
WRONG = {
    "no shape": ({"text": "x"}, "a.jsonl:2 has the fields 'text': a pair has chosen and rejected, and a prompt unless"),
    "no record": ([1], f"a.jsonl:2 is not a record with fields: {MEND}"),
    "no chosen": ({"prompt": "x", "rejected": "y"}, f"a.jsonl:2 has no chosen answer: {MEND}"),
    "null rejected": (TEXT | {"rejected": None}, "a.jsonl:2 has no rejected answer"),
    "empty": (TEXT | {"chosen": ""}, "a.jsonl:2 has an empty answer in chosen"),
    "blank": (TEXT | {"rejected": [{"role": "assistant", "content": " \n"}]}, "a.jsonl:2 has an empty answer in rejected"),
    "empty list": (TEXT | {"rejected": []}, "a.jsonl:2 has an empty answer in rejected"),
    "equal": (TEXT | {"rejected": TEXT["chosen"]}, f"a.jsonl:2 has two equal answers, chosen and rejected: {MEND}"),
    "equal talks": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "a.jsonl:2 has two equal conversations"),
    "beginning": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, GOOD]}, "of which one is the beginning of the other"),
    "differ in what is asked": ({"chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "x"}, GOOD]}, "differ first in message 1, wh"),
    "differ in who speaks": ({"chosen": [ASKED, ASKED, GOOD], "rejected": [ASKED, GOOD]}, "differ first in message 2, which is no answer"),
    "no prompt": ({"chosen": "x", "rejected": "y"}, f"a.jsonl:2 has no prompt: {MEND}"),
    "empty prompt": (TEXT | {"prompt": ""}, "a.jsonl:2 has no prompt"),
    "no prompt, answers": ({"chosen": [GOOD], "rejected": [BAD]}, "a.jsonl:2 has no prompt"),
    "number": (TEXT | {"chosen": 3}, "a.jsonl:2, chosen is int, where a text or a list of messages is wanted"),
    "number as prompt": (TEXT | {"prompt": 3}, "a.jsonl:2, prompt is int, where a text or"),
    "role": (TEXT | {"chosen": [{"role": "boss", "content": "x"}]}, "a.jsonl:2, chosen, message 1 has the role 'boss'"),
    "user answers": (TEXT | {"chosen": [{"role": "user", "content": "x"}]}, "a.jsonl:2 has no answer of the assistant to train on"),
    "margin": (TEXT | {"margin": "large"}, "a.jsonl:2 has the margin 'large', where a number of at least 0 is wanted"),
    "negative margin": (TEXT | {"margin": -1}, "a.jsonl:2 has the margin '-1'"),
    "endless margin": (TEXT | {"margin": float("inf")}, "a.jsonl:2 has the margin 'inf'"),
    "margin that is a list": (TEXT | {"margin": [1]}, "a.jsonl:2 has the margin '[1]'"),
    "half a character": (TEXT | {"chosen": "\ud800"}, "a.jsonl:2 holds what is no text"),
    "no label": ({"prompt": "x", "completion": "y", "label": None}, "a.jsonl:2 has the label 'none', where true or false is wanted"),
    "label": ({"prompt": "x", "completion": "y", "label": 0.7}, "a.jsonl:2 has the label '0.7'"),
    "no completion": ({"prompt": "x", "completion": None, "label": True}, "a.jsonl:2 has no completion"),
    "unasked": ({"completion": "y", "label": True}, "a.jsonl:2 has no prompt"),
    "a single answer": ({"prompt": "x", "completion": "y", "label": True}, "a.jsonl:2 is a single answer, and the records before it are"),
    "equal by template": (TEXT | {"rejected": " It is four. "}, "makes equal: mend or remove it"),
}
STRIPS = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}\
{% else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor %}"""


@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_is_no_preference_is_refused_by_its_place(case, tmp_path, model):
    record, said = WRONG[case]
    path = written(tmp_path / "a.jsonl", [TEXT, record])
    (tmp_path / "strips.jinja").write_text(STRIPS)
    with pytest.raises(CourseError) as caught:
        prepare_preferences(config_of(model, path, template=str(tmp_path / "strips.jinja")), tmp_path / "out", 100)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_sets_that_teach_nothing_are_refused(tmp_path, model):
    good = [{"prompt": f"{n}?", "completion": "y", "label": True} for n in range(20)]
    for records, said in (
        (good, "All 20 answers have the same label"),
        ([], "a.jsonl leaves no preference to learn from: there is no record. Give some"),
        (pairs(1) * 4, "a.jsonl asks one thing alone, so that nothing can be held out: give records with another prompt"),
        ([TEXT | {"chosen": "a " * 99 + "b", "rejected": "a " * 99}] * 2, "2 were dropped, since a row of 30 tokens leaves nothing of the"),
    ):
        with pytest.raises(CourseError, match=said):
            prepare_preferences(config_of(model, written(tmp_path / "a.jsonl", records)), tmp_path / "out", 30)
    with pytest.raises(CourseError, match=r"give preferences.sources, such as \[{path: FILE}\]"):
        prepare_preferences(PreferenceConfig(tokenizer=model), tmp_path, 64)
    with pytest.raises(CourseError, match=r"the model's in preferences.tokenizer"):
        prepare_preferences(config_of(None, "x.jsonl"), tmp_path, 64)


def test_what_was_prepared_is_what_was_said_and_is_found_again(tmp_path, model):
    records = pairs(30, margin=1.5)
    config = config_of(model, written(tmp_path / "a.jsonl", records), system="Be brief.", held_out_share=0.2)
    prepared = prepare_preferences(config, tmp_path / "out", 200)
    report = prepared.report
    assert report.paired and report.examples + report.held_out == 30 == (len(prepared.training) + len(prepared.held_out)) / 2
    assert prepared.folder.name.startswith("preferences-") and report.truncated == report.dropped == 0 and report.stops == ["<|im_end|>"]
    said = {}
    for store in (prepared.training, prepared.held_out):
        assert (store.values == 1.5).all()
        for number in range(len(store)):
            ids, trained = store.document(number), store.trained(number)
            prompt = prepared.tokenizer.decode(ids[~trained].tolist())
            said.setdefault(prompt, []).append(prepared.tokenizer.decode(ids[trained].tolist()))
    assert sorted(said.values()) == sorted([record["chosen"], record["rejected"]] for record in records)
    assert all(prompt.startswith("system\nBe brief.") for prompt in said)
    assert report.trained == sum(int(store.trained(n).sum()) for store in (prepared.training, prepared.held_out) for n in range(len(store)))
    assert report.chosen + report.rejected == report.trained and report.longer == 30
    first, second, *_ = report.lines()
    assert "pairs to train on" in first and "the longer in 100% of the pairs" in second
    again = prepare_preferences(config, tmp_path / "out", 200)
    assert again.folder == prepared.folder and open_preferences(again.folder).report == report
    others = [prepare_preferences(config, tmp_path / "out", 201), prepare_preferences(replace(config, system=None), tmp_path / "out", 200)]
    assert len({prepared.folder, *(other.folder for other in others)}) == 3


def test_single_answers_keep_their_labels(tmp_path, model):
    records = [{"prompt": f"What is {n}?", "completion": f"It is {n}.", "label": n % 3 == 0} for n in range(30)]
    prepared = prepare_preferences(config_of(model, written(tmp_path / "a.jsonl", records), held_out_share=0.2), tmp_path / "out", 100)
    assert not prepared.report.paired and prepared.report.examples == len(prepared.training) and prepared.report.good == 10
    for store in (prepared.training, prepared.held_out):
        for number, value in enumerate(store.values):
            asked = int(prepared.tokenizer.decode(store.document(number).tolist()).split("What is ")[1].split("?")[0])
            assert value == (asked % 3 == 0)
    assert "10 answers are good" in prepared.report.lines()[1]


def example(prompt, answer):
    ids = np.array([*range(prompt), *range(1000, 1000 + answer)])
    return Example(ids, np.arange(prompt + answer) >= prompt, prompt + answer, 0, 1, [])


@settings(max_examples=300)
@given(st.integers(1, 60), st.integers(0, 2), st.lists(st.integers(1, 60), min_size=1, max_size=2), st.integers(8, 100))
def test_answers_are_cut_by_one_rule(prompt, more, answers, room):
    """`more`: the second prompt is longer by a token or two, as where an answer's first letters join the prompt's last token."""
    before = [prompt, prompt + more][: len(answers)]
    kept = cut_to_row([example(*sizes) for sizes in zip(before, answers, strict=True)], room)
    total, least = sum(before) + sum(answers), min(prompt, max(1, room // 8))
    prompts, left = [int((~each.trained).sum()) for each in kept], [int(each.trained.sum()) for each in kept]
    assert sum(len(each.ids) for each in kept) <= room or not sum(left)
    gone = {size - place for size, place in zip(before, prompts, strict=True)}
    assert len(gone) == 1 and prompts[0] >= least, "the same of each prompt, and not all of it"
    for each, size, place, count in zip(kept, before, prompts, left, strict=True):
        assert each.ids.tolist() == [*range(size - place, size), *range(1000, 1000 + count)]
    assert left == [min(answer, max(left)) for answer in answers], "no answer is cut while a longer one remains"
    if total <= room:
        assert left == answers and gone == {0}
    elif left != answers:
        assert prompts[0] == least, "the prompt is cut first"
        assert sum(len(each.ids) for each in kept) + sum(answer > max(left) for answer in answers) > room, "no more than needed"


def test_only_a_chosen_answer_with_more_tokens_is_the_longer_one():
    report = PreferenceReport()
    for lengths in ((3, 3), (4, 3), (3, 4)):
        found = [example(2, length) for length in lengths]
        count(report, found, found, 0.0)
    assert (report.longer, report.chosen, report.rejected) == (1, 10, 10)


def test_the_report_says_what_was_cut(tmp_path, model):
    long = [{"prompt": f"{n} " + "word " * 60, "chosen": f"It is {n}.", "rejected": "No."} for n in range(12)]
    talk = [{"prompt": f"{n}?", "chosen": "yes " * 80, "rejected": f"No {n}."} for n in range(6)]
    report = prepare_preferences(config_of(model, written(tmp_path / "a.jsonl", [*long, *talk]), held_out_share=0.2), tmp_path, 80).report
    assert (report.truncated, report.cut_answers, report.dropped, report.examples + report.held_out) == (18, 6, 0, 18)
    assert "18 were cut to the row, of which 6 lost ends of answers; 0 were dropped" in report.lines()[2]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"template": "pairs"}, "preferences: template is pairs, which is for an encoder-decoder"),
        ({"held_out_share": 0}, "preferences.held_out_share is 0.0: give a number above 0"),
        ({"made": {"pairs": 3}}, "made.pairs is 3: give at least 40"),
        ({"made": {"flipped": 0.5}}, "made.flipped is 0.5: give at least 0 and below 0.5"),
        ({"made": {"prompts": 10_000}}, "made.prompts is 10000: give 0 to"),
        ({"paris": 1}, "There is no setting preferences.paris. Did you mean"),
    ],
)
def test_settings_that_cannot_be_are_named(section, said):
    with pytest.raises(SettingError) as caught:
        configured(PreferenceConfig, section, "preferences")
    assert said in str(caught.value)
