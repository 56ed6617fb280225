"""Settings of rewards, of tasks, and of pairs that are made: what a reward is computed from, and the records that come out."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

from setting_effects.effects import Differs, Effects
from setting_effects.of_alignment import Asked
from shared.finetune.chat.datasets import ChatSource
from shared.preference.config import MadeConfig
from shared.preference.made_preferences import write_made
from shared.rl import rewards
from shared.rl.config import TaskPolicyConfig
from shared.rl.rewards import RewardPart, RewardSet
from shared.rl.tasks import MadeTasks, TasksConfig, open_tasks


def reward_set(part: RewardPart) -> list:
    with patch.object(rewards, "RewardProcess", Asked):
        made = RewardSet([part], [], str, model=len, code=SimpleNamespace())
    return [made.weights, made.share, made.own.functions, made.verifiers.functions, TaskPolicyConfig(rewards=(part,)).reward_model]


REWARD_PART = Effects(RewardPart, observe=reward_set, rows={
    "name": Differs("exact", "number"),
    "weight": Differs(1.0, 2.0),
    "pattern": Differs(None, "a.*", beside={"name": "format"}),
    "folder": Differs(Path("a"), Path("b"), beside={"name": "model"}),
    "options": Differs({}, {"least": 3}, beside={"name": "my_module.my_reward"}),
    "share": Differs(False, True, beside={"name": "code"}),
})  # fmt: skip


def tasks_of(config: TasksConfig) -> list:
    return [[vars(task) for task in side] for side in open_tasks(config)]


def records_of(config: TasksConfig) -> list:
    records = "".join(f'{{"prompt": "p{n}", "answer": "{n}", "question": "q{n}", "solution": "{n}0"}}\n' for n in range(200))
    with TemporaryDirectory() as folder:
        (Path(folder) / "tasks.jsonl").write_text(records)
        return tasks_of(replace(config, sources=(ChatSource(f"{folder}/tasks.jsonl"),)))


def first_of(config: TasksConfig) -> list:
    """Of two files of tasks."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "a.jsonl").write_text("".join(f'{{"prompt": "p{n}", "answer": "{n}"}}\n' for n in range(200)))
        found = [replace(source, path=f"{folder}/{source.path}") for source in config.sources]
        return tasks_of(replace(config, sources=tuple(found)))


TASKS = Effects(TasksConfig, observe=tasks_of, base={"made": MadeTasks(training=6), "held_out": 4}, rows={
    "sources": Differs((), (ChatSource("a.jsonl"),), by=first_of),
    "prompt_field": Differs("prompt", "question", by=records_of),
    "answer_field": Differs("answer", "solution", by=records_of),
    "check": Differs("number", "exact", by=records_of),
    "held_out": Differs(4, 5),
    "made": Differs(MadeTasks(training=6), MadeTasks(training=7)),
})  # fmt: skip

MADE_TASKS = Effects(
    MadeTasks, observe=lambda made: tasks_of(TasksConfig(made=made, held_out=4)), base={"training": 6},
    rows={
        "kinds": Differs(("sum", "count", "function"), ("sum",)), "digits": Differs(2, 3), "training": Differs(6, 7), "seed": Differs(0, 1),
    },
)  # fmt: skip


def made_pairs(config: MadeConfig) -> list[str]:
    with TemporaryDirectory() as folder:
        given = Path(folder) / "mine.jsonl"
        given.write_text("mine")
        made = write_made(Path(folder), replace(config, file=config.file and given))
        return [path.read_text() for path in made]


MADE = Effects(MadeConfig, observe=made_pairs, base={"pairs": 40, "prompts": 4}, rows={
    "pairs": Differs(40, 44), "prompts": Differs(4, 5), "seed": Differs(0, 1), "flipped": Differs(0.0, 0.4),
    "file": Differs(None, Path("mine.jsonl")),
})  # fmt: skip

ALL = [REWARD_PART, TASKS, MADE_TASKS, MADE]
