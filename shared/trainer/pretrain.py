"""Chapter 12. Pretraining as a mode of the trainer: text to predict token by token, bits per byte, samples, and gaps to fill."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import nn

from shared.data.completion import continue_ids, fill_gap, find_gaps, require_prompt
from shared.data.loader import EvaluationLoader, StatefulLoader
from shared.data.mixture import shares_in_words
from shared.data.prepare import PreparedText, open_prepared, prepare
from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed
from shared.parallel.strategy import ParallelStrategy
from shared.totals import Totals, bits_per_byte
from shared.trainer.callbacks import BitsPerByte
from shared.trainer.config import TrainerConfig
from shared.trainer.initial_weights import InitialWeights
from shared.trainer.loaders import evaluation_loader, loaders, prepared_once
from shared.trainer.report import Judged

if TYPE_CHECKING:
    from shared.trainer.run import Run


class Pretraining:
    """The mode pretrain (`shared.trainer.modes.Mode`)."""

    objective = staticmethod(packed_next_token_objective)
    pad_id = None
    left_out = ()

    def __init__(self, config: TrainerConfig, start: InitialWeights | None, world: Communicator, console: Console):
        if start:
            agreed(world, lambda: start.require_extended(given_tokenizer(config, start)))
            config = with_tokenizer_of(config, start)
        prepare_config, folder = config.data.prepare, config.data.prepared
        make = partial(prepare, prepare_config, folder, console)
        self.text: PreparedText = prepared_once(world, folder, make, lambda made: open_prepared(made, prepare_config))
        self.tokenizer, self.end_ids = self.text.tokenizer, [self.text.tokenizer.end_id]

    def require_answerable(self, config: TrainerConfig) -> None:
        for prompt in config.report.prompts:
            require_prompt(self.tokenizer, prompt)

    def more_weights(self) -> list[InitialWeights]:
        return []

    def shaped(self, model: TransformerModel) -> TransformerModel:
        return model

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> tuple[StatefulLoader, EvaluationLoader]:
        return loaders(config, self.text, strategy.mesh)

    def all_held_out(self, config: TrainerConfig, strategy: ParallelStrategy) -> Iterable:
        return evaluation_loader(config, self.text, None, strategy.mesh)

    def callbacks(self, config: TrainerConfig) -> list[Callback]:
        held_out = evaluation_loader(config, self.text, config.data.held_out_rows)
        return [BitsPerByte(held_out.byte_count(self.tokenizer.byte_lengths))]

    def announcement(self, config: TrainerConfig) -> tuple[str, str]:
        text = self.text
        documents = f"{len(text.training):,} documents; {len(text.held_out):,} held out"
        amount = f"{text.training.token_count / 1e6:.1f} million tokens of text ({documents})"
        shares = shares_in_words(config.data.prepare.sources)
        remarks = f"Data mixture, by tokens: {shares}.\n" if shares else ""
        if text.report.unreadable:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in text.report.unreadable.items())
            remarks += f"Left out, for there was no text in it: {reasons}. Examples: {text.folder / 'report.json'}\n"
        if copies := text.report.held_out_in_training:
            remarks += (
                f"{copies:,} of the {len(text.held_out):,} held-out documents are in the training text too, so the held-out loss is too "
                "low: add the stage exact duplicates to data.prepare.cleaning.stages.\n"
            )
        return amount, remarks

    def judge(self, run: "Run", model: nn.Module, totals: Totals) -> Judged:
        config, text = run.config, self.text
        samples = [(prompt, sample(run, model, prompt, number)) for number, prompt in enumerate(config.report.prompts)]
        seq, count = config.data.seq, config.report.completions if config.data.fim.rate > 0 else 0
        gaps = find_gaps(text.held_out, text.tokenizer, count, config.seed, before=seq, after=seq // 2)
        completions = [fill_gap(model, text.tokenizer, gap, seq // 8, context=seq) for gap in gaps]
        held_out_bytes = evaluation_loader(config, text, None).byte_count(text.tokenizer.byte_lengths)
        summary = {
            "held-out bits per byte": bits_per_byte(totals.loss_sum, held_out_bytes),
            "held-out next tokens guessed right": totals.mean_metrics()["correct"],
            "gaps filled exactly": f"{sum(completion.right for completion in completions)} of {len(completions)}",
        }
        return Judged(summary, samples, completions)

    def save_beside(self, folder: Path, longest: int) -> None:
        self.tokenizer.save_pretrained(folder, longest)


def given_tokenizer(config: TrainerConfig, start: InitialWeights) -> TextTokenizer:
    """The tokenizer of the text: the setting's, or the one that belongs to the initial weights."""
    given = config.data.prepare.tokenizer
    return TextTokenizer.load(given) if given else start.text_tokenizer()


def with_tokenizer_of(config: TrainerConfig, start: InitialWeights) -> TrainerConfig:
    prepare = replace(config.data.prepare, tokenizer=config.data.prepare.tokenizer or start.tokenizer)
    return replace(config, data=replace(config.data, prepare=prepare))


def sample(run: "Run", model: nn.Module, prompt: str, number: int) -> str:
    config, tokenizer = run.config, run.mode.tokenizer
    generator = torch.Generator(run.engine.device).manual_seed(config.seed + number)
    ids = continue_ids(
        model, tokenizer, tokenizer.encode(prompt), config.report.new_tokens, context=config.data.seq,
        temperature=config.report.temperature, top_k=config.report.top_k, generator=generator,
    )  # fmt: skip
    return tokenizer.decode(ids)
