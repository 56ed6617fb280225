"""Prompts of several messages, as verl, trl and oumi write them, in the mode grpo."""

import json
from io import StringIO

from preferring_runs import preferring_config
from rich.console import Console

from shared.trainer.modes.answering import Answering
from shared.trainer.run import train_model

SYSTEM, FIRST, SAID, THEN = "Give a number.", "What is 2 plus 3?", "5", "And one more?"
PROMPT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": SAID},
    {"role": "user", "content": THEN},
]


def test_a_prompt_of_several_messages_reaches_the_model_with_its_roles(tmp_path, base, monkeypatch):
    seen, prompts_of = {}, Answering.prompts_of

    def recorded(mode, tasks):
        found = prompts_of(mode, tasks)
        seen.update({task.prompt: mode.tokenizer.decode(ids) for task, ids in zip(tasks, found, strict=True)})
        return found

    monkeypatch.setattr(Answering, "prompts_of", recorded)
    rows = [{"prompt": PROMPT, "answer": 6, "source": "a book"}, *({"prompt": f"What is {n} plus 1?", "answer": n + 1} for n in range(40))]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"grpo.tasks.sources=[{{path: {tmp_path / 'tasks.jsonl'}}}]", "grpo.tasks.held_out=2", "steps=2",
             "report.export=false", "chats.system=Answer briefly."]  # fmt: skip
    screen = Console(file=StringIO(), width=200)
    results = train_model(preferring_config(tmp_path / "run", base, "grpo", *words), screen)
    assert "Fields that stand in no text and change nothing: source (1)." in screen.file.getvalue()
    assert results.judged.summary["fields that stand in no text"] == "source (1)"
    text = seen["\n\n".join(message["content"] for message in PROMPT)]
    assert text == f"system\n{SYSTEM}\nuser\n{FIRST}\nassistant\n{SAID}\nuser\n{THEN}\nassistant\n"  # ChatML without its marks
    assert seen["What is 1 plus 1?"] == "system\nAnswer briefly.\nuser\nWhat is 1 plus 1?\nassistant\n"
