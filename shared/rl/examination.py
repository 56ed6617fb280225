"""Chapter 12. Examination by generation: a model answers held-out tasks, a check scores each answer; accuracy and pass@k.

One examination serves the report of a run, the stages of a pipeline and `course eval`, so that their figures mean the same.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from shared.finetune.instructions import Task
from shared.finetune.soft_prompts import virtual_ids
from shared.model.init import stream_seed
from shared.rl.code_reward import CodeReward
from shared.rl.generation import Drawing, generate_tokens, stop_strings
from shared.rl.rewards import RewardPart, RewardSet
from shared.sampling import evaluating

Check = Callable[[Sequence[Task], Sequence[str]], list[float]]  # tasks and an answer to each -> the scores; 1 is right
Advance = Callable[[int], None]  # called with how many more requests are done
GREEDY = Drawing(temperature=0.0)


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The unbiased estimate from n answers, of which c are right: 1 - C(n - c, k) / C(n, k).

    It is the share of all choices of k of the n answers that hold a right one. 1 - (1 - c/n)^k, which suggests itself, is too small on
    average.

    Args:
        answers: n, at least k.
        right: c of them.
        k: at least 1.

    Raises:
        ValueError: numbers that cannot be.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4)
    (0.25, 0.5, 0.0)
    """
    if not (0 <= right <= answers and 1 <= k <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, {right} right: k must be 1 to the number of answers, of which so many are right.")
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def mean_pass_at_k(right: Sequence[int], answers: int, k: int) -> float:
    """Mean over prompts. right: of each prompt's answers, so many are right."""
    return sum(pass_at_k(answers, each, k) for each in right) / len(right)


def silent(count: int) -> None:
    """Ignore progress."""


class Answer(NamedTuple):
    """A model's greedy answer to a held-out task.

    score: 1 for right, less for wrong; or the hidden preference's reward. ended: whether the model ended it before the limit.
    """

    kind: str
    prompt: str
    wanted: str
    text: str
    score: float
    ended: bool


class Compared(NamedTuple):
    """A held-out task with the answers before training and after, and the score of each (`Answer`)."""

    kind: str
    prompt: str
    wanted: str
    before: str
    after: str
    score_before: float
    score_after: float

    @property
    def won(self) -> float:
        """1 where the later answer is preferred, 0 where the earlier one is, 1/2 for equal ones."""
        return 0.5 + 0.5 * ((self.score_after > self.score_before) - (self.score_after < self.score_before))


def compared(before: Sequence[Answer], after: Sequence[Answer]) -> list[Compared]:
    return [Compared(*old[:3], old.text, new.text, old.score, new.score) for old, new in zip(before, after, strict=True)]


@dataclass(frozen=True)
class Examination:
    """An exam for models: held-out tasks, how answers are generated, and how they are checked.

    Args:
        tasks: what is asked.
        prompts: their ids, as the model reads them.
        check: scores the answers.
        decode: ids to text.
        new_tokens: of an answer at most.
        limits: `context`, `stops` and `start_id`, as `generate_tokens` takes them.
        samples: answers to each task that are sampled for pass@k, beside the greedy one.
        drawing: how they are sampled.
        stream, seed: name and seed of their random numbers.
        stop: texts that end an answer.
    """

    tasks: Sequence[Task]
    prompts: Sequence[Sequence[int]]
    check: Check
    decode: Callable[[list[int]], str]
    new_tokens: int
    limits: dict[str, Any]
    samples: int = 0
    drawing: Drawing = GREEDY
    stream: str = "held-out"
    seed: int = 0
    stop: Collection[str] = ()

    def __len__(self) -> int:
        """Requests."""
        return len(self.tasks) * (1 + self.samples)

    def answers(self, model: nn.Module, advance: Advance = silent) -> list[Answer]:
        """The greedy answers."""
        said = self.generated(model, self.prompts, GREEDY, None, advance)
        scores = self.check(self.tasks, [text for text, _ in said])
        return [
            Answer(task.kind, task.prompt, task.answer, text, score, ended)
            for task, (text, ended), score in zip(self.tasks, said, scores, strict=True)
        ]

    def pass_at_k(self, model: nn.Module, advance: Advance = silent) -> dict[int, list[float]]:
        """k -> pass@k of each task, for the powers of 2 up to `samples`."""
        if not self.samples or not self.tasks:
            return {}
        prompts, tasks = ([each for each in some for _ in range(self.samples)] for some in (self.prompts, self.tasks))
        seeds = [stream_seed(f"{self.stream} {number}", self.seed) for number in range(len(prompts))]
        said = self.generated(model, prompts, self.drawing, seeds, advance)
        scores = self.check(tasks, [text for text, _ in said])
        right = [sum(score == 1 for score in scores[first : first + self.samples]) for first in range(0, len(scores), self.samples)]
        powers = [2**power for power in range(self.samples.bit_length())]
        return {k: [pass_at_k(self.samples, count, k) for count in right] for k in powers}

    def mean_pass_at_k(self, model: nn.Module, advance: Advance = silent) -> dict[int, float]:
        """k -> the mean over tasks."""
        return {k: sum(found) / len(found) for k, found in self.pass_at_k(model, advance).items()}

    def generated(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], drawing: Drawing, seeds: Sequence[int] | None, advance: Advance
    ) -> list[tuple[str, bool]]:
        how = {"drawing": drawing, "seeds": seeds, "stop": self.stop, "advance": advance}
        return generated(model, prompts, self.new_tokens, self.decode, **how, **self.limits)


def generated(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    decode: Callable[[list[int]], str],
    *,
    stops: Collection[int],
    stop: Collection[str] = (),
    advance: Advance = silent,
    **settings: Any,
) -> list[tuple[str, bool]]:
    """The text of an answer to each prompt, up to a text of `stop`, and whether the model ended it. settings: of `generate_tokens`."""
    ids, ended, before = [[] for _ in prompts], [False] * len(prompts), virtual_ids(model)
    stop_here = stop_strings(decode, stop) if stop else None
    with evaluating(model):
        read = [[*before, *prompt] for prompt in prompts]
        for token in generate_tokens(model, read, new_tokens, stops=stops, stop_here=stop_here, **settings):
            ended[token.number] = token.ended
            if token.token not in stops:
                ids[token.number].append(token.token)
            advance(int(token.last))
    return [(cut_at(decode(each), stop), is_ended) for each, is_ended in zip(ids, ended, strict=True)]


def cut_at(text: str, stop: Collection[str]) -> str:
    """A text up to the first of some others in it."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


class TaskChecks:
    """Scores answers by their tasks' own checks, in processes that start with the first answer. A check that fails counts as 0. To be used
    in a `with` statement."""

    def __init__(self) -> None:
        self.code = CodeReward()
        self.rewards: RewardSet | None = None

    def __enter__(self) -> "TaskChecks":
        return self

    def __exit__(self, *raised: object) -> None:
        if self.rewards is not None:
            self.rewards.close()
        self.code.close()

    def __call__(self, tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
        self.rewards = self.rewards or RewardSet((RewardPart(),), (), str, code=self.code, failed=0.0)
        return self.rewards.judged(tasks, answers)[0]
