"""Settings of what a trained model is asked: how tokens are drawn, a chat, the tasks of an evaluation; and the stages of a pipeline."""

from collections.abc import Sequence
from pathlib import Path

import torch

from setting_effects import of_data
from setting_effects.effects import Differs, Effects, Shown
from setting_effects.of_trainer import MODEL
from shared.data.source import Source
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel
from shared.rl.generation import Drawing
from shared.trainer.evaluation.measures import measure, open_subject
from shared.trainer.evaluation.tasks import EvalTask, Item, open_task
from shared.trainer.pipeline import stages
from shared.trainer.pipeline.stages import PipelineEntry, StageEntry
from shared.trainer.talk.chat import AnswerSettings, Talk
from shared.trainer.talk.server import Question, Said


def drawn(drawing: Drawing) -> list:
    made = torch.Generator().manual_seed(1)
    logits, uniform = torch.randn(200, 12, generator=made), torch.rand(200, generator=made, dtype=torch.float64)
    return list(drawing(logits, uniform, [[3, 4, 3]] * 200))


DRAWING = Effects(Drawing, observe=drawn, rows={
    "temperature": Differs(1.0, 0.5), "top_k": Differs(None, 3), "top_p": Differs(None, 0.5), "min_p": Differs(None, 0.3),
    "repetition_penalty": Differs(1.0, 1.5),
})  # fmt: skip


def said(settings: AnswerSettings) -> list[str]:
    return list(Talk(TransformerModel(MODEL, seed=3).eval(), of_data.tokenizer(), None, settings).answer("def function_1(value):"))


ANSWERS = Effects(AnswerSettings, observe=said, base={"new_tokens": 12}, rows={
    "drawing": Differs(Drawing(0.7), Drawing(3.0)), "new_tokens": Differs(12, 5), "stop": Differs((), ("15",)), "seed": Differs(0, 1),
})  # fmt: skip


# Evaluation.


def measured(task: EvalTask) -> list:
    """A task's questions, what a model's figures in them are, and what is judged."""
    asked: list = []

    def judge(items: Sequence[Item], answers: Sequence[str]) -> list[bool]:
        asked.append([*map(repr, items), *answers])
        return [len(answer) % 2 == 0 for answer in answers]

    with of_data.text_folder():
        of_data.tokenizer().save_pretrained(Path("first"), 128)
        save_pretrained(TransformerModel(MODEL, seed=3), Path("first"), token_ids={"eos_token_id": of_data.tokenizer().end_id})
        Path("first", "chat_template.jinja").write_text(of_data.CHATML)
        found = measure(open_subject(Path("first"), device="cpu"), loaded := open_task("mine", task), judge)
        return [[*map(repr, loaded.items)], repr(found.metrics), found.answers, asked]


RECORDS = {"kind": "generate", "data": Source("chats.jsonl"), "prompt": "{{ prompt }}", "answer": "completion", "limit": 2, "new_tokens": 8}
CHOICES = "[completion, 'No.']"
TEXT = {"kind": "text", "data": Source("code"), "limit": 2}
SHOTS = {"shots": 1}
DRAWS = {"samples": 2}

TASK = Effects(EvalTask, observe=measured, base=RECORDS, rows={
    "kind": Differs("generate", "choice", beside={"choices": CHOICES}),
    "data": Differs(Source("code"), Source("more"), beside=TEXT),
    "prompt": Differs("{{ prompt }}", "Say: {{ prompt }}"),
    "choices": Differs(CHOICES, "[completion, 'Yes.']", beside={"kind": "choice"}),
    "answer": Differs("completion", "prompt"),
    "delimiter": Differs(" ", " = ", beside=SHOTS),
    "shots": Differs(0, 1),
    "shots_from": Differs(None, Source("talks/a.jsonl"), beside=SHOTS),
    "shots_delimiter": Differs("\n\n", "\n", beside=SHOTS),
    "seed": Differs(0, 1, beside=DRAWS),
    "chat": Differs(False, True),
    "check": Differs("exact", "number"),
    "new_tokens": Differs(8, 4),
    "stop": Differs((), ("9",)),
    "samples": Differs(0, 2),
    "temperature": Differs(0.8, 3.0, beside=DRAWS),
    "overlap": Differs(1, 100, beside=TEXT | {"data": Source("code/long0.py")}),
    "limit": Differs(2, 3),
})  # fmt: skip


# Pipelines, and what a page of a chat asks.


def planned(entry: PipelineEntry) -> list:
    with of_data.text_folder():
        for name in ("a", "b"):
            Path(f"{name}.yaml").write_text(f"steps: {100 + ord(name)}\nschedule: {{warmup_steps: 1}}\n")
        text = f"output: {entry.output}\nstages:\n"
        for each in entry.stages:
            text += f"  - {{name: {each.name}, config: {each.config}, layout: {each.layout or 'null'}}}\n"
        Path("mine.yaml").write_text(text)
        made = stages.read_pipeline(Path("mine.yaml"), [])
        return [made.output, *([each.name, each.file, each.words, each.layout, each.config.steps] for each in made.stages)]


FIRST = StageEntry("first", Path("a.yaml"))

PIPELINE = Effects(PipelineEntry, observe=planned, base={"output": Path("out"), "stages": (FIRST,)}, rows={
    "output": Differs(Path("out"), Path("other")),
    "stages": Differs((FIRST,), (FIRST, StageEntry("second", Path("b.yaml")))),
})  # fmt: skip

STAGE = Effects(
    StageEntry, observe=lambda entry: planned(PipelineEntry(Path("out"), (entry,))), base={"name": "first", "config": Path("a.yaml")},
    rows={
        "name": Differs("first", "other"), "config": Differs(Path("a.yaml"), Path("b.yaml")), "layout": Differs(None, "dp2"),
    },
)  # fmt: skip

TURNS = "trainer/test_chat_web.py::test_the_conversation_is_the_pages_own_and_old_turns_leave_whole"
ANSWERED = "trainer/test_chat_web.py::test_an_answer_is_what_the_terminal_prints_and_ends_with_its_figures"

QUESTION = Effects(Question, rows={"messages": Shown(TURNS), "settings": Shown(ANSWERED), "system": Shown(ANSWERED)})
SAID = Effects(Said, rows={"role": Shown(TURNS), "content": Shown(ANSWERED)})

ALL = [DRAWING, ANSWERS, TASK, PIPELINE, STAGE, QUESTION, SAID]
