"""Chapter 12. Evaluation by generation: a chat model answers held-out prompts before training and after, in every mode that trains one."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shared.course.errors import SettingError
from shared.data.loader import EvaluationLoader, StatefulLoader
from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.template import call_of
from shared.finetune.instructions import Task
from shared.model.transformer import TransformerModel
from shared.parallel.mesh import Mesh
from shared.parallel.strategy import ParallelStrategy
from shared.rl.generation import answer_all
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import Run, require_rows
from shared.trainer.weights import InitialWeights

Loaders = tuple[StatefulLoader, EvaluationLoader]  # of the rows to train on, and of those that are held out
AT_ONCE = 64  # tasks that the template renders in one request


class Answering:
    """What modes have in common that start from given weights and train a chat model (`shared.trainer.mode.Mode`).

    Attributes:
        start: the first weights.
        text: what was prepared, with its template, its report and its tokenizer.
        tasks: held-out prompts that the report has answered.
        start_id: what an encoder-decoder's decoder reads first; None for a decoder.
        system: the system prompt of what was prepared, which held-out prompts begin with as well.
    """

    start: InitialWeights
    text: Any
    tokenizer: TextTokenizer
    tasks: Sequence[Task] = ()
    start_id: int | None = None
    system: str | None = None
    pad_id: int | None = None
    left_out: tuple[str, ...] = ()
    virtual_tokens = 0

    @property
    def end_ids(self) -> list[int]:
        return [self.tokenizer.special(name) for name in self.text.report.stops] or [self.tokenizer.end_id]

    @property
    def stops(self) -> set[int]:
        """The tokens that end an answer."""
        return {*self.end_ids, self.tokenizer.end_id}

    def more_weights(self) -> list[InitialWeights]:
        return []

    def shaped(self, model: TransformerModel) -> TransformerModel:
        return model

    def rows(self, config: TrainerConfig, strategy: ParallelStrategy, held_out_rows: int | None) -> Loaders:
        """This rank's rows to train on, and those that are held out. held_out_rows: how many of the latter; None for all."""
        raise NotImplementedError

    def sizes(self, config: TrainerConfig, mesh: Mesh, held_out_rows: int | None) -> dict[str, Any]:
        """What the loaders of this rank's rows take."""
        data = config.data
        return {
            "seq": data.seq,
            "batch_size": data.batch_size,
            "micro_batch_size": data.micro_batch_size,
            "seed": config.seed,
            "epochs": data.epochs,
            "held_out_rows": held_out_rows,
            "rank": mesh.data.rank,
            "ranks": mesh.data.size,
        }

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> Loaders:
        training, held_out = self.rows(config, strategy, config.data.held_out_rows)
        require_rows(training, config)
        return training, held_out

    def all_held_out(self, config: TrainerConfig, strategy: ParallelStrategy) -> Iterable:
        return self.rows(config, strategy, config.report.held_out_rows)[1]

    def callbacks(self, config: TrainerConfig) -> list[Callback]:
        return []

    def require_room(self, config: TrainerConfig, tasks: Sequence[Task], where: object) -> None:
        """Refuse prompts that leave no room for an answer."""
        for task, prompt in zip(tasks, self.prompts_of(tasks), strict=True):
            if len(prompt) >= config.data.seq - self.virtual_tokens:
                raise SettingError(f"A task of {where} is longer than a row of data.seq {config.data.seq}: {task.prompt[:60]!r}.")

    def prompts_of(self, tasks: Sequence[Task]) -> list[list[int]]:
        """What the model reads before it answers each task."""
        if self.text.template is None:
            before = f"{self.system}\n\n" if self.system else ""  # as `PairExamples` joins them
            return [[*self.tokenizer.encode(before + task.prompt), self.tokenizer.end_id] for task in tasks]
        encoder, found = ChatEncoder(self.tokenizer), []
        said = [{"role": "system", "content": self.system}] if self.system is not None else []
        for first in range(0, len(tasks), AT_ONCE):
            messages = [encoder.guarded([*said, {"role": "user", "content": task.prompt}]) for task in tasks[first : first + AT_ONCE]]
            rendered = self.text.template.render_all([call_of(each, True, None) for each in messages])
            found += [each.ids for each in encoder.encode([each.text for each in rendered])]
        return found

    def answers(
        self, prompts: list[list[int]], model: TransformerModel, config: TrainerConfig, new_tokens: int | None = None
    ) -> list[str]:
        """What a model answers to prompts, given as ids: the likeliest token each time. new_tokens: at most; None for the report's."""
        new_tokens, context = new_tokens or config.report.new_tokens, config.data.seq
        found = answer_all(model, prompts, new_tokens, context=context, stops=self.stops, start_id=self.start_id)
        return [self.tokenizer.decode(ids) for ids in found]

    def before_and_after(self, prompts: list[list[int]], run: Run, model: TransformerModel) -> tuple[list[str], list[str]]:
        """The answers of the model that the run started from, and of the trained one."""
        first = self.start.load(run.config.model, run.engine.device)
        return self.answers(prompts, first, run.config), self.answers(prompts, model, run.config)

    def example(self) -> list[tuple[str, bool]]:
        """A text that was trained on, in pieces, each with whether it is a target."""
        return self.text.report.shown[0] if self.text.report.shown else []

    def save_beside(self, folder: Path, longest: int) -> None:
        self.tokenizer.save_pretrained(folder, longest)
        if self.text.template is not None:
            self.text.template.save(folder)


def trained_parameters(model: TransformerModel) -> int:
    """How many numbers a run has trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
