"""Chapter 12. Evaluation by generation: a chat model answers held-out prompts before training and after, in every mode that trains one."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from shared.course.errors import SettingError
from shared.data.loader import EvaluationLoader, StatefulLoader
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.messages import text_of
from shared.finetune.chat.template import call_of
from shared.finetune.instructions import Task
from shared.model.transformer import TransformerModel
from shared.parallel.mesh import Mesh
from shared.parallel.strategy import ParallelStrategy
from shared.rl.examination import Compared, Examination, compared
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import Mode, Run, require_rows
from shared.trainer.weights import InitialWeights

Loaders = tuple[StatefulLoader, EvaluationLoader]  # of the rows to train on, and of those that are held out
AT_ONCE = 64  # tasks that the template renders in one request


class Answering(Mode):
    """A mode that starts from given weights and trains a chat model.

    Attributes:
        start: the first weights.
        text: what was prepared, with its template, its report and its tokenizer.
        tasks: held-out prompts that the report has answered.
        start_id: what an encoder-decoder's decoder reads first; None for a decoder.
        system: the system prompt of what was prepared, which held-out prompts begin with as well.
    """

    start: InitialWeights
    tasks: Sequence[Task] = ()
    start_id: int | None = None
    system: str | None = None
    virtual_tokens = 0

    @property
    def end_ids(self) -> list[int]:
        return [self.tokenizer.special(name) for name in self.text.report.stops] or [self.tokenizer.end_id]

    @property
    def stops(self) -> set[int]:
        """The tokens that end an answer."""
        return {*self.end_ids, self.tokenizer.end_id}

    def rows(self, config: TrainerConfig, strategy: ParallelStrategy, held_out_rows: int | None) -> Loaders:
        """The loaders of this rank's training rows and held-out rows. held_out_rows: how many of the latter; None for all."""
        raise NotImplementedError

    def sizes(self, config: TrainerConfig, mesh: Mesh, held_out_rows: int | None) -> dict[str, Any]:
        """Arguments of the loaders of this rank's rows."""
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

    def require_room(self, config: TrainerConfig, tasks: Sequence[Task], where: object) -> None:
        """Reject prompts after which no answer fits."""
        for task, prompt in zip(tasks, self.prompts_of(tasks), strict=True):
            if len(prompt) >= config.data.seq - self.virtual_tokens:
                raise SettingError(f"A task of {where} is longer than a row of data.seq {config.data.seq}: {task.prompt[:60]!r}.")

    def prompts_of(self, tasks: Sequence[Task]) -> list[list[int]]:
        """The prompt of each task, as token ids."""
        if self.text.template is None:
            texts = [text_of(task.asked(self.system or None)) for task in tasks]
            return [[*self.tokenizer.encode(text), self.tokenizer.end_id] for text in texts]
        encoder, found = ChatEncoder(self.tokenizer), []
        for first in range(0, len(tasks), AT_ONCE):
            for _, some in groupby(tasks[first : first + AT_ONCE], key=lambda task: bool(task.tools)):
                asked = [encoder.guarded([task.asked(self.system), task.tools, task.arguments]) for task in some]
                template = self.text.template.for_tools(asked[0][1])
                calls = [arguments | call_of(messages, True, tools) for messages, tools, arguments in asked]
                for call in calls:
                    template.require_shown(call)
                rendered = template.render_all(calls)
                found += [each.ids for each in encoder.encode([each.text for each in rendered])]
        return found

    def limits(self, config: TrainerConfig) -> dict[str, Any]:
        """Arguments of `generate_tokens` that say where an answer ends."""
        return {"context": config.data.seq, "stops": self.stops, "start_id": self.start_id}

    def check(self, tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
        """The score of each answer to its task; 1 is right."""
        return [float(task.solved_by(answer)) for task, answer in zip(tasks, answers, strict=True)]

    def examination(self, config: TrainerConfig) -> Examination:
        """The examination of a model on the held-out tasks."""
        new_tokens, limits = config.report.new_tokens, self.limits(config)
        return Examination(self.tasks, self.prompts_of(self.tasks), self.check, self.tokenizer.decode, new_tokens, limits, seed=config.seed)

    def first_model(self, run: Run) -> TransformerModel:
        """The model that the run started from."""
        return run.start_again().load(run.config.model, run.engine.device)

    def compared(self, run: Run, model: TransformerModel) -> list[Compared]:
        """The answers of the model that the run started from, and of the trained one."""
        examination = self.examination(run.config)
        return compared(examination.answers(self.first_model(run)), examination.answers(model))

    def example(self) -> list[tuple[str, bool]]:
        """A training example in pieces of text, each with whether it is trained on."""
        return self.text.report.shown[0] if self.text.report.shown else []

    def close(self) -> None:
        """End the processes that check answers, if there are any; the next answer starts new ones."""

    def save_beside(self, folder: Path, longest: int) -> None:
        super().save_beside(folder, longest)
        if self.text.template is not None:
            self.text.template.save(folder)


def trained_parameters(model: TransformerModel) -> int:
    """The number of trained parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
