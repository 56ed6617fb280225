"""Chapter 12. Supervised fine-tuning (SFT) as a mode of the trainer: loss on an assistant's answers, and accuracy on held-out tasks.

The rows are chapter 10's: conversations as a template writes them, packed, with targets only where the assistant speaks; or pairs of texts
for an encoder-decoder. At the end the model answers tasks that it was not trained on, and the model that the run started from does too.
"""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from shared.data.objectives import encoder_decoder_objective
from shared.finetune.answer_objective import answer_objective
from shared.finetune.chat.datasets import ChatSource
from shared.finetune.chat.prepare import PreparedChats, open_chats, prepare_chats
from shared.finetune.chat.rows import chat_loaders
from shared.finetune.instructions import read_tasks, write_instructions
from shared.model.hf.files import START
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed
from shared.parallel.strategy import ParallelStrategy
from shared.totals import Totals
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import Judged, Run, prepared_once, right_shares
from shared.trainer.modes.answering import Answering, Loaders, trained_parameters
from shared.trainer.modes.turns import require_trained_turns
from shared.trainer.weights import InitialWeights


class FineTuning(Answering):
    """The mode sft."""

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        self.start, folder = start, config.data.prepared
        self.virtual_tokens, self.system = config.virtual_tokens, config.chats.system

        def make() -> PreparedChats:
            made, _ = instruction_files(config)
            chats = config.chats if config.chats.sources else replace(config.chats, sources=(ChatSource(str(made)),))
            chats = replace(chats, tokenizer=chats.tokenizer or start.tokenizer_folder())
            return prepare_chats(chats, folder, config.data.seq - self.virtual_tokens, console)

        self.text: PreparedChats = prepared_once(world, folder, make, open_chats)
        self.tokenizer = self.text.tokenizer
        agreed(world, lambda: start.require_extended(self.tokenizer))
        agreed(world, lambda: require_trained_turns(config, start, self.tokenizer))
        pairs = self.text.template is None
        self.objective = encoder_decoder_objective if pairs else answer_objective
        self.start_id = decoder_start(start) if pairs else None

    def require_answerable(self, config: TrainerConfig) -> None:
        _, tasks = instruction_files(config)
        self.tasks = read_tasks(tasks)[: config.instructions.tasks] if tasks else []
        self.require_room(config, self.tasks, tasks)

    def rows(self, config: TrainerConfig, strategy: ParallelStrategy, held_out_rows: int | None) -> Loaders:
        virtual_ids = range(config.model.vocab_size, config.model.vocab_size + self.virtual_tokens)
        sizes = self.sizes(config, strategy.mesh, held_out_rows)
        return chat_loaders(self.text, virtual_ids=virtual_ids, start_id=self.start_id, **sizes)

    def announcement(self, config: TrainerConfig) -> tuple[str, str]:
        report = self.text.report
        amount = f"{report.examples:,} conversations ({report.held_out:,} held out), {report.trained / 1e6:.2f} million tokens of answers"
        return amount, "".join(f"{line}\n" for line in [*report.lines()[1:3], *report.remarks()])

    def judge(self, run: Run, model: TransformerModel, totals: Totals) -> Judged:
        answered = self.compared(run, model)
        summary = {
            "held-out loss on answers": totals.mean_loss,
            "held-out answer tokens guessed right": totals.mean_metrics()["correct"],
            **right_shares(answered),
            "trained parameters": trained_parameters(model),
        }
        return Judged(summary, answered=answered, example=self.example())


def instruction_files(config: TrainerConfig) -> tuple[Path | None, Path | None]:
    """The files of conversations and of held-out tasks: of the generated set, if the run names no conversations of its own."""
    mine = config.instructions
    if config.chats.sources:
        return None, mine.file
    conversations, tasks = write_instructions(config.data.prepared, mine.examples, mine.tasks, mine.seed)
    return conversations, mine.file or tasks


def decoder_start(start: InitialWeights) -> int:
    """The decoder's start token of an encoder-decoder: T5 takes its padding token, which is 0."""
    ids = start.open().token_ids
    return ids.get(START) or ids.get("pad_token_id") or 0
