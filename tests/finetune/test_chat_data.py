"""Conversations from files of three kinds and three shapes; what is none is refused by its place; prepared once, found again, reported."""

import json
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from shared.course.errors import CourseError
from shared.data.shards import ENDING, ShardError, TokenStore
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat import prepare, sides
from shared.finetune.chat.datasets import ChatSource, conversation_of, open_chats_of
from shared.finetune.chat.prepare import ChatConfig, open_chats, prepare_chats
from tests.support import chat_templates as published

ASKED = {"role": "user", "content": "What is two plus two?"}
SAID = {"role": "assistant", "content": "It is four."}
TALK = [ASKED, SAID]
RECORDS = {
    "messages": {"messages": TALK},
    "parts": {"messages": [{"role": "user", "content": [{"text": "What is "}, {"type": "text", "text": "two plus two?"}]}, SAID]},
    "conversations": {"conversations": [{"from": "human", "value": ASKED["content"]}, {"from": "gpt", "value": SAID["content"]}]},
    "json": {"messages": json.dumps(TALK)},
    "prompt": {"prompt": ASKED["content"], "completion": SAID["content"]},
    "prompt list": {"prompt": [ASKED], "completion": [SAID]},
    "instruction": {"instruction": "What is", "input": "two plus two?", "output": SAID["content"]},
    "no input": {"instruction": ASKED["content"], "input": "", "output": SAID["content"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return published.save_tokenizer(tmp_path_factory.mktemp("model"))


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def config_of(model, *paths, **options):
    return ChatConfig(sources=tuple(ChatSource(str(path)) for path in paths), tokenizer=model, **options)


def chats(count, answer="It is {}."):
    return [{"prompt": f"What is {number}?", "completion": answer.format(number)} for number in range(count)]


@pytest.mark.parametrize("shape", RECORDS)
def test_each_shape_gives_the_same_messages(shape):
    joined = "What is\n\ntwo plus two?" if shape == "instruction" else ASKED["content"]
    conversation = conversation_of(RECORDS[shape], "a.jsonl:1")
    assert [(m["role"], m["content"]) for m in conversation.messages] == [("user", joined), ("assistant", SAID["content"])]
    assert conversation.first == (0 if "messages" in RECORDS[shape] or shape == "conversations" else 1)


def test_a_system_prompt_and_tools_come_along():
    tools = [{"type": "function", "function": {"name": "add"}}]
    record = {"system": "Be brief.", "tools": json.dumps(tools), **RECORDS["conversations"]}
    conversation = conversation_of(record, "a.jsonl:1")
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."} and conversation.tools == tools
    assert conversation.with_system("Other.") is conversation
    given = conversation_of(RECORDS["prompt"], "a.jsonl:1").with_system("Be kind.")
    assert given.messages[0]["content"] == "Be kind." and given.first == 2


def test_files_of_every_kind_give_the_same_conversations(tmp_path):
    records = [RECORDS["messages"], {"messages": [*TALK, {**ASKED, "content": "Sure?"}, {**SAID, "content": "Yes."}]}]
    written(tmp_path / "a.jsonl", records)
    (tmp_path / "b.json").write_text(json.dumps(records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    (tmp_path / "d.csv").write_text('messages\n"' + '"\n"'.join(json.dumps(r["messages"]).replace('"', '""') for r in records) + '"\n')
    import datasets

    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    wanted = [[(m["role"], m["content"]) for m in record["messages"]] for record in records]
    for name in ("a.jsonl", "b.json", "c.parquet", "d.csv", "saved"):
        found = list(open_chats_of(ChatSource(str(tmp_path / name))))
        assert [[(m["role"], m["content"]) for m in one.messages] for one in found] == wanted, name
        assert [one.place for one in found] == [f"{name}:1", f"{name}:2"]
    assert len(list(open_chats_of(ChatSource(str(tmp_path / "a.jsonl"), limit=1)))) == 1
    folder = ChatSource(str(tmp_path), suffixes=(".jsonl", ".parquet"))
    assert [one.place for one in open_chats_of(folder)] == ["a.jsonl:1", "a.jsonl:2", "c.parquet:1", "c.parquet:2"]
    (tmp_path / "repository").mkdir()
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "repository" / "train-00000.parquet")
    for streaming in (False, True):  # as `datasets` opens a dataset of the hub
        found = list(open_chats_of(ChatSource(str(tmp_path / "repository"), kind="hub", streaming=streaming)))
        assert [[(m["role"], m["content"]) for m in one.messages] for one in found] == wanted


WRONG = {
    "no messages": ({"messages": []}, "a.jsonl:2 has no message in messages: mend or remove it."),
    "no turns": ({"conversations": [], "id": "a"}, "a.jsonl:2 has no message in conversations: mend or remove it."),
    "no shape": ({"text": "x", "label": 3}, "a.jsonl:2 has the fields 'text', 'label': a conversation has messages; prompt and"),
    "no record": ([1, 2], "a.jsonl:2 is not a record with fields"),
    "no list": ({"messages": 3}, "a.jsonl:2 has no list of messages"),
    "no message": ({"messages": ["x"]}, "a.jsonl:2, message 1 is str, not a message with role and content"),
    "role": ({"messages": [{"role": "boss", "content": "x"}]}, "message 1 has the role 'boss', which is none of system, user"),
    "no content": ({"messages": [{"role": "user"}, SAID]}, "a.jsonl:2, message 1 has nothing as content"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]}, "message 1 has list as content"),
    "no answer": ({"messages": [ASKED]}, "a.jsonl:2 has no answer of the assistant to train on"),
    "no completion": ({"prompt": TALK, "completion": [ASKED]}, "a.jsonl:2 has no answer of the assistant to train on"),
    "late system": ({"messages": [ASKED, {"role": "system", "content": "x"}, SAID]}, "message 2 has the role system and stands in"),
    "lost tool": ({"messages": [ASKED, {"role": "tool", "content": "x"}, SAID]}, "message 2 has the role tool and stands in the wrong"),
    "half a character": ({"prompt": "\ud800", "completion": "x"}, "a.jsonl:2 holds what is no text"),
    "number": ({"prompt": 3, "completion": "x"}, "a.jsonl:2 has no list of messages, and no text, where one is wanted"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_is_no_conversation_is_refused_by_its_place(case, tmp_path):
    record, said = WRONG[case]
    path = written(tmp_path / "a.jsonl", [RECORDS["messages"], record])
    with pytest.raises(CourseError) as caught:
        list(open_chats_of(ChatSource(str(path))))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path, model):
    (tmp_path / "a.jsonl").write_text('{"messages": [}\n')
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "c.txt").write_text("words")
    (tmp_path / "d.csv").write_text("a,b\n1,2\n")
    (tmp_path / "e.csv").write_bytes(b"\xff\x00\xa4,\x03\n\xb8\x01,2\n")
    for name, said in (
        ("a.jsonl", "a.jsonl:1 is not JSON: mend or remove it"),
        ("b.parquet", "is not a whole Parquet file"),
        ("c.txt", "is no file of conversations: give JSONL, CSV or Parquet"),
        ("d.csv", "d.csv:1 has the fields 'a', 'b'"),
        ("e.csv", "e.csv:1 has names of fields that are no text"),
        ("absent.jsonl", "absent.jsonl does not exist"),
    ):
        with pytest.raises(CourseError, match=said):
            list(open_chats_of(ChatSource(str(tmp_path / name))))
    with pytest.raises(CourseError, match="The embedded corpus holds no conversations"):
        list(open_chats_of(ChatSource("embedded")))
    with pytest.raises(CourseError, match="There are no conversations to train on: give chats.sources"):
        prepare_chats(ChatConfig(tokenizer=model), tmp_path, 64)
    with pytest.raises(CourseError, match="There is no tokenizer"):
        prepare_chats(config_of(None, "x.jsonl"), tmp_path, 64)
    with pytest.raises(CourseError, match="jsonl leaves no conversation to train on: there is no record. Give some"):
        prepare_chats(config_of(model, written(tmp_path / "e.jsonl", [])), tmp_path, 64)
    for wrong in ({"held_out_share": 0.0}, {"held_out_share": 1.0}):
        with pytest.raises(ValueError, match="held_out_share"):
            ChatConfig(**wrong)
    with pytest.raises(ValueError, match="template is empty"):
        ChatConfig(template=" ")
    with pytest.raises(ValueError, match="limit is 0"):
        ChatSource("x", limit=0)


# Preparation.


def test_ids_and_masks_are_stored_and_come_back(tmp_path, model):
    prepared = prepare_chats(config_of(model, written(tmp_path / "a.jsonl", chats(20)), system="Be brief."), tmp_path / "out", 200)
    tokenizer, texts = prepared.tokenizer, set()
    for store in (prepared.training, prepared.held_out):
        for number in range(len(store)):
            ids, trained = store.document(number), store.trained(number)
            text = tokenizer.decode(ids, keep_special=True)
            texts.add(text)
            answer = tokenizer.decode(ids[trained], keep_special=True)
            assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is ") and text.endswith(answer)
            assert answer.startswith("It is ") and answer.endswith(".<|im_end|>") and trained[-1]
    assert len(texts) == 20
    report = prepared.report
    assert (report.examples, report.held_out) == (len(prepared.training), len(prepared.held_out))
    assert (report.turns, report.dropped, report.truncated) == (20, 0, 0)
    assert report.read == prepared.training.token_count + prepared.held_out.token_count
    assert report.trained == sum(int(s.trained(n).sum()) for s in (prepared.training, prepared.held_out) for n in range(len(s)))
    assert report.stops == ["<|im_end|>"] and report.longest == max(prepared.training.lengths.max(), prepared.held_out.lengths.max())
    assert any("[[It is 0.<|im_end|>]]" in line for line in report.lines())


def test_the_same_is_prepared_once_and_found_again(tmp_path, model, monkeypatch):
    path = written(tmp_path / "a.jsonl", chats(12))
    config = config_of(model, path)
    first = prepare_chats(config, tmp_path / "out", 100)
    stamp = {file: file.stat().st_mtime_ns for file in first.folder.rglob("*") if file.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_chats", None)
        again = prepare_chats(config, tmp_path / "out", 100)
    assert again.folder == first.folder and again.report == first.report and again.training.fingerprint == first.training.fingerprint
    assert {file: file.stat().st_mtime_ns for file in first.folder.rglob("*") if file.is_file()} == stamp
    opened = open_chats(first.folder)
    assert opened.template.render(TALK) == first.template.render(TALK) and opened.tokenizer.identity == first.tokenizer.identity
    others = [
        prepare_chats(config, tmp_path / "out", 101),
        prepare_chats(replace(config, system="x"), tmp_path / "out", 100),
        prepare_chats(replace(config, held_out_share=0.3), tmp_path / "out", 100),
        prepare_chats(replace(config, template="pairs"), tmp_path / "out", 100),
    ]
    written(path, chats(13))
    others.append(prepare_chats(config, tmp_path / "out", 100))
    assert len({made.folder for made in [first, *others]}) == 6


def test_an_interrupted_preparation_begins_again_and_ends_with_the_same_bytes(tmp_path, model, monkeypatch):
    monkeypatch.setattr(sides, "PART", 200)
    config = config_of(model, written(tmp_path / "a.jsonl", chats(40)), held_out_share=0.3)
    whole = prepare_chats(config, tmp_path / "whole", 100)
    assert len(whole.training.shards) > 2
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare.SideWriter, "finish", lambda writer: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare_chats(config, tmp_path / "cut", 100)
    part = next((tmp_path / "cut").glob("chats-*"))
    assert not (part / "report.json").exists() and list(part.glob(f"*/*{ENDING}"))
    (part / "training" / f"99999{ENDING}").write_bytes(b"left over")
    again = prepare_chats(config, tmp_path / "cut", 100)
    files = [sorted((file.relative_to(made.folder), file.read_bytes()) for file in made.folder.rglob("*.*")) for made in (whole, again)]
    assert files[0] == files[1]


def test_a_conversation_is_cut_to_the_row_and_left_out_if_nothing_trained_is_left(tmp_path, model):
    long = {"prompt": "What is it? " * 30, "completion": "It is four."}
    talk = [*TALK, {**ASKED, "content": "And? " * 20}, SAID]
    path = written(tmp_path / "a.jsonl", [*chats(10), long, {"messages": talk}])
    seq = 70
    prepared = prepare_chats(config_of(model, path, held_out_share=0.1), tmp_path / "out", seq)
    lengths = np.concatenate([prepared.training.lengths, prepared.held_out.lengths])
    report = prepared.report
    assert (report.dropped, report.truncated, len(lengths), lengths.max()) == (1, 2, 11, seq + 1)
    assert report.longest > 2 * seq and "2 were cut to the row, and 1 dropped" in report.lines()[2]
    with pytest.raises(CourseError, match="of 1, each has its first answer after the row's 70 tokens"):
        prepare_chats(config_of(model, written(tmp_path / "b.jsonl", [long])), tmp_path / "out", seq)


def test_conversations_with_one_prompt_stay_on_one_side_and_both_sides_have_some(tmp_path, model):
    for count in (2, 5, 60):
        records = [record for record in chats(count) for _ in range(3)]
        prepared = prepare_chats(config_of(model, written(tmp_path / f"{count}.jsonl", records), held_out_share=0.2), tmp_path / "out", 100)
        prompts = [
            {prepared.tokenizer.decode(store.document(n)[~store.trained(n)]) for n in range(len(store))}
            for store in (prepared.training, prepared.held_out)
        ]
        assert all(prompts) and not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == count
    with pytest.raises(CourseError, match="one.jsonl asks one thing alone, so that nothing can be held out: give records with an"):
        prepare_chats(config_of(model, written(tmp_path / "one.jsonl", chats(1) * 3)), tmp_path / "out", 100)


def test_a_share_that_leaves_a_side_of_many_conversations_empty_is_refused(tmp_path, model, monkeypatch):
    monkeypatch.setattr("shared.finetune.chat.sides.PART", 1)  # the first shard is written after one conversation: too late to count out
    config = config_of(model, written(tmp_path / "a.jsonl", chats(4)), held_out_share=1e-15)
    with pytest.raises(CourseError, match="a.jsonl leaves nothing on the side held_out, .* or a larger chats.held_out_share than 1e-15"):
        prepare_chats(config, tmp_path / "out", 100)


def test_a_tokenizer_without_the_templates_tokens_gets_them(tmp_path):
    tokenizer = TextTokenizer.train(published.TEXT, 500)
    tokenizer.save_pretrained(tmp_path / "model", 64)
    path = written(tmp_path / "a.jsonl", chats(6))
    prepared = prepare_chats(config_of(tmp_path / "model", path), tmp_path / "out", 100)
    grown = prepared.tokenizer
    assert [grown.special(name) for name in ("<|im_start|>", "<|im_end|>")] == [tokenizer.vocab_size, tokenizer.vocab_size + 1]
    assert grown.vocab_size == tokenizer.vocab_size + 2 == prepared.training.vocab_size and grown.end == tokenizer.end
    assert grown.encode("It is <|im_end|>") == tokenizer.encode("It is <|im_end|>")
    assert grown.with_special(["<|im_end|>"]) is grown


def test_a_mask_of_everything_or_nothing_is_refused_by_the_conversation_and_the_template(tmp_path, model):
    path = written(tmp_path / "a.jsonl", [{"messages": TALK}])
    for source, said in (
        ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}", "trains on every token, the prompt too"),
        ("{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}", "leaves no token to train on"),
    ):
        template = tmp_path / "odd.jinja"
        template.write_text(source)
        with pytest.raises(CourseError, match=f"a.jsonl:1: the chat template .*odd.jinja {said}"):
            prepare_chats(config_of(model, path, template=str(template)), tmp_path / "out", 100)


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_messages_that_the_models_own_template_refuses_are_named(name, tmp_path):
    model = published.save_tokenizer(tmp_path / "model")
    (model / "chat_template.jinja").write_text(published.TEMPLATES[name])
    twice = {"messages": [ASKED, ASKED, SAID]}
    with pytest.raises(CourseError, match="a.jsonl:2: The chat template .*jinja refuses these messages: Conversation roles must"):
        prepare_chats(config_of(model, written(tmp_path / "a.jsonl", [*chats(1), twice]), template=None), tmp_path / "out", 100)
    prepared = prepare_chats(config_of(model, written(tmp_path / "b.jsonl", chats(4)), template=None), tmp_path / "out", 100)
    assert prepared.report.stops == [{"mistral": "</s>", "gemma": "<end_of_turn>"}[name]]
    assert prepared.training.document(0)[0] == prepared.tokenizer.special("<s>")


def test_a_store_whose_marks_were_changed_or_do_not_fit_is_refused(tmp_path, model):
    from shared.data.shards import write_shard

    prepared = prepare_chats(config_of(model, written(tmp_path / "a.jsonl", chats(6))), tmp_path / "out", 100)
    path = next((prepared.folder / "training").glob(f"*{ENDING}"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardError, match="was changed after it was written"):
        TokenStore(path.parent)
    with pytest.raises(ValueError, match="3 tokens, of which 2 are marked"):
        write_shard(tmp_path / f"b{ENDING}", [[1, 2, 3]], [3], "one", 10, [np.ones(2, bool)])
