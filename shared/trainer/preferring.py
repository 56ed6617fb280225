"""Chapter 12. Win rate by a hidden preference, and the preparation of pairs: what the trainer's modes on preferences have in common."""

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from shared.data.shards import TokenStore
from shared.finetune.chat.datasets import ChatSource
from shared.finetune.instructions import read_tasks
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed
from shared.preference.made_preferences import SCORES, Judge, MadeSet, write_made
from shared.preference.prepare import PreparedPairs, open_preferences, prepare_preferences
from shared.trainer.answering import Answering
from shared.trainer.config import TrainerConfig
from shared.trainer.initial_weights import InitialWeights
from shared.trainer.loaders import prepared_once
from shared.trainer.report import Preferred

if TYPE_CHECKING:
    from shared.trainer.run import Run


SAMPLES = 8  # prompts whose answers are shown where nobody judges them


class Preferring(Answering):
    """What the modes reward, dpo and ppo have in common.

    Attributes:
        text: the prepared pairs.
        judge_of: what the hidden preference says of an answer to a held-out prompt; None where nobody knows it.
    """

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        self.start, self.system = start, config.preferences.system
        self.judge_of: Judge | None = None

        def make() -> PreparedPairs:
            made, given = made_set(config), config.preferences
            sources = given.sources or (ChatSource(str(made.pairs)),)
            given = replace(given, sources=sources, tokenizer=given.tokenizer or start.tokenizer_folder())
            return prepare_preferences(given, config.data.prepared, config.data.seq, console)

        self.text: PreparedPairs = prepared_once(world, config.data.prepared, make, open_preferences)
        self.tokenizer = self.text.tokenizer
        agreed(world, lambda: start.require_extended(self.tokenizer))

    def require_answerable(self, config: TrainerConfig) -> None:
        made, file, most = made_set(config), config.preferences.made.file, config.preferences.made.prompts
        if most and (found := file or (made and made.held_out)):
            self.tasks = read_tasks(found, SCORES)[:most]
            self.require_room(config, self.tasks, found)
            self.judge_of = Judge(self.tasks)

    def announcement(self, config: TrainerConfig) -> tuple[str, str]:
        report = self.text.report
        kind = "pairs" if report.paired else "answers with a label"
        amount = f"{report.examples:,} {kind} ({report.held_out:,} held out)"
        return amount, "".join(f"{line}\n" for line in report.lines()[1:3])

    def samples(self, run: "Run", model: TransformerModel) -> list[tuple[str, str]]:
        """Prompts of held-out pairs with the answers of the trained model and of the first one, where nobody judges answers."""
        if self.judge_of is not None:
            return []
        prompts = prompts_of_pairs(self.text.held_out, SAMPLES)
        before, after = self.before_and_after(prompts, run, model)
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        return [(text, f"{new}\n\nbefore: {old}") for text, old, new in zip(texts, before, after, strict=True)]

    def preferred(self, run: "Run", model: TransformerModel) -> tuple[list[Preferred], dict[str, float]]:
        """The answers to held-out prompts before training and after, with the hidden preference's reward of each; and a summary of them.
        Both are empty where there is no such preference."""
        if self.judge_of is None:
            return [], {}
        before, after = self.before_and_after(self.prompts_of(self.tasks), run, model)
        found = [
            Preferred(task.kind, task.prompt, old, new, self.judge_of(task.prompt, old), self.judge_of(task.prompt, new))
            for task, old, new in zip(self.tasks, before, after, strict=True)
        ]
        return found, {
            "win rate over the first model, by the hidden preference": fmean(each.won for each in found),
            "hidden preference's reward before": fmean(each.reward_before for each in found),
            "hidden preference's reward after": fmean(each.reward_after for each in found),
            "characters of an answer before": fmean(map(len, before)),
            "characters of an answer after": fmean(map(len, after)),
        }


def prompts_of_pairs(store: TokenStore, most: int | None = None) -> list[list[int]]:
    """The prompts of prepared pairs, each once. most: how many."""
    found: dict[tuple[int, ...], None] = {}
    for number in range(len(store)):
        if len(found) == most:
            break
        found[tuple(store.document(number)[: int(store.trained(number).argmax())].tolist())] = None
    return [list(prompt) for prompt in found]


def made_set(config: TrainerConfig) -> MadeSet | None:
    """The set made on the spot; None where the run names pairs of its own."""
    return None if config.preferences.sources else write_made(config.data.prepared, config.preferences.made)
