"""Settings of conversations and pairs of answers: what is read of a source, what is prepared, what is made on the spot."""

from pathlib import Path

from setting_effects.effects import Differs, Effects
from setting_effects.of_data import ASKED_FOR, inside, stored
from shared.course.errors import CourseError
from shared.finetune.chat.datasets import ChatSource, open_chats_of
from shared.finetune.chat.prepare import ChatConfig, prepare_chats
from shared.preference.config import MadeConfig, PreferenceConfig
from shared.preference.prepare import prepare_preferences
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.pairs import made_set
from shared.trainer.modes.sft import instruction_files
from shared.trainer.sections import DataConfig, InstructionConfig


def conversations_of(source: ChatSource) -> list[str] | str:
    try:
        return [*map(repr, open_chats_of(source))]
    except CourseError as error:
        return str(error)


CHAT_SOURCE = Effects(ChatSource, observe=inside(conversations_of), rows=ASKED_FOR | {
    "path": Differs("chats.jsonl", "talks/a.jsonl"),
    "kind": Differs("auto", "csv", beside={"path": "chats.jsonl"}),
    "suffixes": Differs((), (".jsonl",), beside={"path": "talks"}),
    "limit": Differs(None, 2, beside={"path": "chats.jsonl"}),
})  # fmt: skip

PREPARED_CHATS = {
    "template": Differs("chatml", "mine.jinja"),
    "tokenizer": Differs(Path("tokens"), Path("others")),
    "system": Differs(None, "Be brief."),
    "held_out_share": Differs(0.2, 0.5),
}

CHATS = Effects(
    ChatConfig, observe=inside(lambda config: stored(prepare_chats(config, Path.cwd() / "out", 48))),
    base={"sources": (ChatSource("chats.jsonl"),), "tokenizer": Path("tokens"), "held_out_share": 0.2},
    rows=PREPARED_CHATS | {"sources": Differs((ChatSource("chats.jsonl"),), (ChatSource("chats.jsonl", limit=30),))},
)  # fmt: skip


def sets_of(preferences: PreferenceConfig) -> list:
    config = TrainerConfig(mode="dpo", start_from=Path("x"), data=DataConfig(prepared=Path.cwd() / "out"), preferences=preferences)
    return [path.read_text() for path in made_set(config)]


PREFERENCES = Effects(
    PreferenceConfig, observe=inside(lambda config: stored(prepare_preferences(config, Path.cwd() / "out", 48))),
    base={"sources": (ChatSource("pairs.jsonl"),), "tokenizer": Path("tokens"), "held_out_share": 0.2},
    rows=PREPARED_CHATS | {
        "sources": Differs((ChatSource("pairs.jsonl"),), (ChatSource("pairs.jsonl", limit=30),)),
        "made": Differs(MadeConfig(pairs=40), MadeConfig(pairs=44), by=inside(sets_of), beside={"sources": ()}),
    },
)  # fmt: skip


def made_of(instructions: InstructionConfig) -> list:
    config = TrainerConfig(mode="sft", start_from=Path("x"), data=DataConfig(prepared=Path.cwd() / "out"), instructions=instructions)
    return [path.read_text() for path in instruction_files(config)]


INSTRUCTIONS = Effects(InstructionConfig, observe=inside(made_of), base={"examples": 20, "tasks": 4}, rows={
    "examples": Differs(20, 21), "tasks": Differs(4, 5), "seed": Differs(0, 1), "file": Differs(None, Path("mine.jsonl")),
})  # fmt: skip

ALL = [CHAT_SOURCE, CHATS, PREFERENCES, INSTRUCTIONS]
