"""`course check-data`: what a file's records train, which of their fields nothing reads, and which of them are refused."""

import json

from click.testing import CliRunner

from shared.course.cli import cli

TALK = [
    {"role": "user", "content": "A?"}, {"role": "assistant", "content": "WRONG", "weight": 0},
    {"role": "user", "content": "B?"}, {"role": "assistant", "content": "RIGHT\u001b[2J", "reasoning_content": "Hm."},
]  # fmt: skip


def course(tmp_path, rows, *words):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return CliRunner().invoke(cli, ["check-data", str(file), *words])


def words_of(result) -> str:
    return " ".join(result.output.split())


def test_conversations_are_shown_with_what_is_trained_and_what_is_not_read(tmp_path):
    shown = course(tmp_path, [{"messages": TALK, "source": "x"}] * 3 + [{"messages": [{"role": "boss", "content": "A?"}]}], "--seq", "5")
    assert shown.exit_code == 1 and "4 records, read as chats, by the fields of the first." in words_of(shown)
    assert "source (3), messages.reasoning_content (3)" in words_of(shown) and "3 are longer than a row of 5 tokens" in words_of(shown)
    assert "1 would be refused" in words_of(shown) and "has the role 'boss'" in words_of(shown)
    assert shown.output.count("WRONG") == 3 and "[[WRONG" not in shown.output and "[[RIGHT" in shown.output and "\x1b" not in shown.output


def test_pairs_and_tasks_are_known_by_their_fields(tmp_path):
    pairs = course(tmp_path, [{"prompt": "1+1?", "chosen": "2", "rejected": "3", "rating": 4}], "--show", "2")
    assert pairs.exit_code == 0 and "read as preferences" in words_of(pairs) and "[[2<|im_end|>]]" in pairs.output
    assert "[[3<|im_end|>]]" in pairs.output and "rating (1)" in pairs.output
    tasks = course(tmp_path, [{"prompt": "1+1?", "answer": "2"}, {"prompt": "x", "answer": "many"}])
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"style": "rule", "ground_truth": "2"}}
    verl = course(tmp_path, [row])
    assert "Fields that stand in no text and change nothing: data_source (1)." in words_of(verl)
    assert verl.exit_code == 0 and "1+1?\n=> 2  (check: number)" in verl.output
    assert tasks.exit_code == 1 and "=> 2  (check: number)" in tasks.output and "does not pass its own check, number" in words_of(tasks)


def test_a_file_without_records_is_refused(tmp_path):
    empty = course(tmp_path, [])
    assert empty.exit_code != 0 and "Traceback" not in empty.output
