"""Chapter 12. Pretraining as a mode of the trainer: text to predict token by token, bits per byte, samples, and gaps to fill."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from rich.console import Console
from torch import nn

from shared.course.errors import CourseError
from shared.data.completion import find_gaps, gap_ids, require_prompt
from shared.data.fim import FillInMiddle
from shared.data.loader import EvaluationLoader, StatefulLoader
from shared.data.mixture import shares_in_words, training_loader
from shared.data.prepare import PreparedText, open_prepared, prepare
from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback
from shared.model.chunked_loss import packed_next_token_objective
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed
from shared.parallel.mesh import Mesh
from shared.parallel.strategy import ParallelStrategy
from shared.rl.generation import Drawing, answer_all
from shared.totals import Totals, bits_per_byte
from shared.trainer.config import TrainerConfig
from shared.trainer.costs import BitsPerByte
from shared.trainer.mode import Judged, Mode, Run, prepared_once, require_rows
from shared.trainer.sections import FIM_SLACK
from shared.trainer.weights import InitialWeights


class Pretraining(Mode):
    """The mode pretrain."""

    objective = staticmethod(packed_next_token_objective)

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

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> tuple[StatefulLoader, EvaluationLoader]:
        return loaders(config, self.text, strategy.mesh)

    def all_held_out(self, config: TrainerConfig, strategy: ParallelStrategy) -> Iterable:
        return evaluation_loader(config, self.text, config.report.held_out_rows, strategy.mesh)

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
        if dropped := text.report.in_words():
            remarks += f"{dropped}Examples: {text.folder / 'report.json'}\n"
        if copies := text.report.held_out_in_training:
            remarks += (
                f"{copies:,} of the {len(text.held_out):,} held-out documents are in the training text too, so the held-out loss is too "
                "low: add the stage exact duplicates to data.prepare.cleaning.stages.\n"
            )
        return amount, remarks

    def judge(self, run: Run, model: nn.Module, totals: Totals) -> Judged:
        config, text, rows = run.config, self.text, run.config.report.held_out_rows
        seq, count = config.data.seq, config.report.completions if config.data.fim.rate > 0 else 0
        gaps = find_gaps(text.held_out, text.tokenizer, count, config.seed, before=seq, after=seq // 2)
        filled = self.continued(model, [gap_ids(text.tokenizer, gap) for gap in gaps], seq // 8, seq, Drawing(temperature=0.0))
        completions = [gap._replace(filled=middle) for gap, middle in zip(gaps, filled, strict=True)]
        judged_on, everything = evaluation_loader(config, text, rows), evaluation_loader(config, text, None)
        summary = {
            "held-out bits per byte": bits_per_byte(totals.loss_sum, judged_on.byte_count(text.tokenizer.byte_lengths)),
            "held-out next tokens guessed right": totals.mean_metrics()["correct"],
            "gaps filled exactly": f"{sum(completion.right for completion in completions)} of {len(completions)}",
        }
        if len(judged_on.rows) < len(everything.rows):
            summary["rows of held-out text in that"] = f"{len(judged_on.rows):,} of {len(everything.rows):,}"
        return Judged(summary, list(zip(config.report.prompts, self.samples(run, model), strict=True)), completions)

    def samples(self, run: Run, model: nn.Module) -> list[str]:
        """Continuations of the report's prompts, each sampled with a separate random stream."""
        report, config = run.config.report, run.config
        prompts = [self.tokenizer.encode(prompt) for prompt in report.prompts]
        drawing = Drawing(report.temperature, report.top_k)
        seeds = [config.seed + number for number in range(len(prompts))]
        return self.continued(model, prompts, report.new_tokens, config.data.seq, drawing, seeds)

    def continued(
        self, model: nn.Module, prompts: list[list[int]], new_tokens: int, context: int, drawing: Drawing, seeds: list[int] | None = None
    ) -> list[str]:
        """Continuations of prompts, up to the end of a document. Of a prompt that does not fit, the model reads the end."""
        prompts = [prompt[-max(1, context - new_tokens) :] for prompt in prompts]
        stops = {self.tokenizer.end_id}
        found = answer_all(model, prompts, new_tokens, context=context, stops=stops, drawing=drawing, seeds=seeds)
        return [self.tokenizer.decode(ids) for ids in found]


def given_tokenizer(config: TrainerConfig, start: InitialWeights) -> TextTokenizer:
    """The tokenizer of the text: the configured one, or that of the initial weights."""
    given = config.data.prepare.tokenizer
    return TextTokenizer.load(given) if given else start.text_tokenizer()


def with_tokenizer_of(config: TrainerConfig, start: InitialWeights) -> TrainerConfig:
    prepare = replace(config.data.prepare, tokenizer=config.data.prepare.tokenizer or start.tokenizer)
    return replace(config, data=replace(config.data, prepare=prepare))


def loaders(config: TrainerConfig, text: PreparedText, mesh: Mesh) -> tuple[StatefulLoader, EvaluationLoader]:
    """The loaders of this rank's shard of training text, with FIM applied, and of held-out text, without."""
    data, transform = config.data, None
    if data.fim.rate > 0:
        if data.fim.split != "token" and text.tokenizer.adds_space:
            raise CourseError("The tokenizer adds a space to each piece of text, so to each moved middle: set data.fim.split to token.")
        transform = FillInMiddle(data.fim, text.tokenizer.encode, text.tokenizer.decode, text.tokenizer.fim_tokens)
    training = training_loader(
        text.training,
        data.prepare.sources,
        text.documents,
        seq=data.seq,
        batch_size=data.batch_size,
        micro_batch_size=data.micro_batch_size,
        seed=config.seed,
        rank=mesh.data.rank,
        ranks=mesh.data.size,
        epochs=data.epochs,
        transform=transform,
        slack=FIM_SLACK if transform else 0,
        strategy=data.strategy,
    )
    require_rows(training, config)
    return training, evaluation_loader(config, text, data.held_out_rows, mesh)


def evaluation_loader(config: TrainerConfig, text: PreparedText, rows: int | None, mesh: Mesh | None = None) -> EvaluationLoader:
    """Loader of held-out text: a rank's shard of it, or, without a mesh, all of it."""
    rank, ranks = (mesh.data.rank, mesh.data.size) if mesh else (0, 1)
    return EvaluationLoader(text.held_out, seq=config.data.seq, batch_size=config.data.micro_batch_size, limit=rows, rank=rank, ranks=ranks)
