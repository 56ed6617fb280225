"""Chapter 12. GRPO on verifiable tasks as a mode of the trainer: rollouts as the loader, rewards by name, and pass@k on held-out tasks.

The policy begins as the model of start_from and answers each task several times. What it is compared with is that first model, kept beside
it, or the policy without its adapter.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from shared.course import figures as style
from shared.course.extensions import called
from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback, Metrics
from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.encoding import ChatExamples
from shared.finetune.chat.prepare import ChatReport, chat_tokenizer
from shared.finetune.chat.template import ChatTemplate
from shared.finetune.chat.unread import Unread
from shared.finetune.instructions import Task
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed, require_agreement
from shared.parallel.strategy import ParallelStrategy
from shared.preference.rollouts import RolloutMetrics, require_prompts
from shared.rl.code_reward import CodeReward
from shared.rl.examination import Examination, compared
from shared.rl.generation import Drawing
from shared.rl.grpo import GRPOAdvantages, GRPOObjective, GroupLoader
from shared.rl.rewards import TASK, RewardPart, RewardSet
from shared.rl.tasks import ChatTask, open_tasks
from shared.rl.verifiers import CODE
from shared.totals import Totals
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import Judged, Run, right_shares
from shared.trainer.modes.answering import AT_ONCE, Answering, trained_parameters
from shared.trainer.modes.rollouts import Rolling, reward_by, reward_weights
from shared.trainer.modes.turns import require_trained_turns
from shared.trainer.weights import InitialWeights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("reward", "kl_to_reference", "answer_tokens", "ended", "zero_variance", "entropy")  # of the metrics of a rollout


@dataclass(frozen=True)
class Prompting:
    """How tasks become prompts, in the form of prepared conversations. report: empty but for the tokens that end an answer."""

    tokenizer: TextTokenizer
    template: ChatTemplate
    report: ChatReport


class TaskPolicyOptimization(Rolling, Answering):
    """The mode grpo.

    Attributes:
        training: the tasks that are answered. tasks: those that are held out.
        code: what runs programs, where answers are programs.
        verdicts: the rewards, from when there are loaders.
    """

    def __init__(self, config: TrainerConfig, start: InitialWeights, world: Communicator, console: Console):
        self.start, self.system, self.console = start, config.chats.system, console
        self.objective, grpo = GRPOObjective(config.grpo), config.grpo
        unread: Counter[str] = Counter()
        self.training, self.tasks = agreed(world, lambda: open_tasks(grpo.tasks, unread))
        self.text = agreed(world, lambda: prompting(config, start, self.training[0]))
        unread.update(agreed(world, lambda: unread_in_prompts([*self.training, *self.tasks], self.text)))
        self.text.report.unread = dict(unread.most_common())
        self.tokenizer = self.text.tokenizer
        agreed(world, lambda: start.require_extended(self.tokenizer))
        agreed(world, lambda: require_trained_turns(config, start, self.tokenizer))
        written = json.dumps([asdict(task) for task in (*self.training, *self.tasks)]).encode()
        require_agreement(world, "tasks", {"sha256": hashlib.sha256(written).hexdigest(), "tokenizer": self.tokenizer.identity})
        if grpo.reward_model:
            self.rewards = agreed(world, lambda: reward_weights(grpo.reward_model, self.tokenizer, "grpo.rewards"))
        names, checks = {part.name for part in grpo.rewards}, {task.check for task in (*self.training, *self.tasks)}
        self.code = CodeReward() if CODE in names | checks else None
        self.verdicts: RewardSet | None = None

    def require_answerable(self, config: TrainerConfig) -> None:
        self.require_room(config, self.tasks, "grpo.tasks")
        if self.tasks:
            require_prompts(self.prompts_of(self.tasks), config.grpo.new_tokens, config.data.seq)

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> tuple[GroupLoader, None]:
        grpo = config.grpo
        model = reward_by(self.rewards, config, strategy) if self.rewards else None
        self.verdicts = agreed(strategy.mesh.world, lambda: RewardSet(
            grpo.rewards, self.training, self.tokenizer.decode, model, self.code, grpo.reward_seconds, grpo.reward_failed
        ))  # fmt: skip
        return self.rollouts(
            GroupLoader, config, strategy, grpo, grpo.reference, prompts=self.prompts_of(self.training), reward=self.verdicts,
            advantages=GRPOAdvantages(grpo),
        ), None  # fmt: skip

    def callbacks(self, config: TrainerConfig) -> list[Callback]:
        self.measured = RolloutAlarms(self.console, self.close, config.grpo.temperature)
        return [self.measured]

    def announcement(self, config: TrainerConfig) -> tuple[str, str]:
        by = " + ".join(f"{part.weight:g} x {called(part.name)}" for part in config.grpo.rewards)
        runs = f"Programs run in a sandbox: {self.code.describe()}\n" if self.code else ""
        fields = "".join(f"{line}\n" for line in self.text.report.remarks())
        return f"{len(self.training):,} tasks to answer ({len(self.tasks):,} held out)", f"Answers are rewarded by {by}.\n{runs}{fields}"

    def judge(self, run: Run, model: TransformerModel, totals: Totals | None) -> Judged:
        examination, first = self.examination(run.config), self.first_model(run)
        try:
            answered = compared(examination.answers(first), examination.answers(model))
            were, are = examination.mean_pass_at_k(first), examination.mean_pass_at_k(model)
        finally:
            self.close()
        summary: dict[str, Any] = right_shares(answered)
        for k in were:
            summary |= {f"held-out pass@{k} before": were[k], f"held-out pass@{k} after": are[k]}
        found = alarms(self.measured.loader.metrics, run.config.grpo.temperature, summary.get("held-out tasks right before"))
        summary |= self.last_rollout(SHOWN) | {"alarms": " ".join(found.values()) or "none"}
        if unread := self.text.report.unread:
            summary |= {"fields that stand in no text": ", ".join(f"{name} ({count:,})" for name, count in unread.items())}
        summary |= {"why the loss says little": self.measured.explained(), "trained parameters": trained_parameters(model)}
        figures = {"pass_at_k": plot_pass_at_k(were, are)} if were else {}
        return Judged(summary, answered=answered, figures=figures, unit="mean of advantages, weighed by ratios")

    def examination(self, config: TrainerConfig) -> Examination:
        grpo = config.grpo
        settings = {"new_tokens": grpo.new_tokens, "samples": grpo.held_out_answers, "drawing": Drawing(grpo.temperature)}
        return replace(super().examination(config), **settings)

    def close(self) -> None:
        for each in (self.verdicts, self.code):
            if each is not None:
                each.close()

    def check(self, tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
        """The score of each answer by its task's own check; 0 where the check fails after training."""
        if self.verdicts is None:
            self.verdicts = RewardSet((RewardPart(),), self.tasks, self.tokenizer.decode, code=self.code)
        elif self.verdicts.failed is None:
            self.verdicts.failed = 0.0
        return self.verdicts.judged(tasks, answers, TASK)[0]


class RolloutAlarms(RolloutMetrics):
    """Logs the metrics of rollouts, and prints a warning the first time that one of them is alarming. close: called when the run ends.
    temperature: of the answers.

    Attributes:
        first: the loss and the gradient's norm of the first step.
    """

    def __init__(self, console: Console, close: Callable[[], None], temperature: float):
        super().__init__(None)
        self.console, self.close, self.temperature = console, close, temperature
        self.said, self.first = set[str](), [0.0, 0.0]

    def on_step(self, engine: Any) -> None:
        if engine.step == 1:
            self.first = [engine.loss, engine.grad_norm]

    def on_log(self, engine: Any, metrics: Metrics) -> None:
        for name, sentence in alarms(self.loader.metrics, self.temperature).items():
            if name not in self.said:
                self.said.add(name)
                self.console.print(f"Step {engine.step}: {sentence}", markup=False, highlight=False, soft_wrap=True)

    def on_end(self, engine: Any) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "said": sorted(self.said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.said = state["first"], {*state["said"]}

    def explained(self) -> str:
        """Why the loss is near 0 while its gradient is not."""
        loss, norm = self.first
        return (
            "The advantages of a group add up to 0, and right after a rollout all ratios are 1: the loss of a rollout is then near 0, "
            "whatever its answers are worth. The gradient is not, because it makes the better answers likelier "
            f"(step 1: loss {loss:.4f}, gradient norm {norm:.4f}). Look at the reward."
        )


def prompting(config: TrainerConfig, start: InitialWeights, task: Task) -> Prompting:
    """The tokenizer, the template, and the tokens that end an answer, found by rendering a task with its own answer."""
    tokenizer, template = chat_tokenizer(config.chats.tokenizer or start.tokenizer_folder(), config.chats.template)
    messages = [*task.asked(config.chats.system), {"role": "assistant", "content": task.answer}]
    asked = Conversation("A task", messages, task.tools, len(messages) - 1, arguments=task.arguments)
    [example] = ChatExamples(tokenizer, template, config.data.seq)([asked])
    return Prompting(tokenizer, template, ChatReport(stops=example.stops))


def unread_in_prompts(tasks: Sequence[Task], text: Prompting) -> Counter[str]:
    """The fields of messages in prompts, and arguments, that the template shows nothing of."""

    def rendered(some: Sequence[Conversation]) -> list[str]:
        return [each.text for each in text.template.for_tools(some[0].tools).render_all([each.call(prompt=True) for each in some])]

    found = Unread(lambda asked: rendered([asked])[0])
    asked = [Conversation("A task", task.asked(), task.tools, arguments=task.arguments) for task in tasks if isinstance(task, ChatTask)]
    for first in range(0, len(asked), AT_ONCE):
        for _, some in groupby(asked[first : first + AT_ONCE], key=lambda each: bool(each.tools)):
            for each, words in zip(alike := [*some], rendered(alike), strict=True):
                found.note(each, words)
    return found.counts


def plot_pass_at_k(before: dict[int, float], after: dict[int, float]) -> "Figure":
    """pass@k against k, before training and after."""
    figure = style.new_figure()
    axes = figure.subplots()
    for name, found in (("before", before), ("after", after)):
        axes.plot([*found], [*found.values()], "o-", label=name)
    axes.set(xlabel="k, drawn answers", ylabel="held-out pass@k", xscale="log", ylim=(0, 1))
    axes.set_xticks([*before], [*map(str, before)])
    axes.legend()
    return figure


class Alarm(NamedTuple):
    """metric: of a rollout. rings: whether its value is alarming. sentence: the warning, with `value` in it."""

    metric: str
    rings: Callable[[float], bool]
    sentence: str


ALARMS = (
    Alarm(
        "without_reward", lambda value: value > 0,
        "No reward applies to {value:.0%} of the answers (each function of grpo.rewards returned None): they count in no group and teach "
        "nothing. If that is not meant, give a reward for these tasks, or take them out of grpo.tasks.",
    ),
    Alarm(
        "zero_variance", lambda value: value > 0.9,
        "In {value:.0%} of the groups all answers have the same score and teach nothing: tasks are too hard or too easy for the policy, "
        "or groups too small. Change tasks, grpo.answers or grpo.rounds.",
    ),
    Alarm(
        "ended", lambda value: value < 0.5,
        "Only {value:.0%} of the answers ended by themselves, the others were cut off: raise grpo.new_tokens, or punish length "
        "(grpo.overlong_penalty).",
    ),
    Alarm(
        "entropy", lambda value: value < 0.02,
        "The entropy is {value:.3f} nats a token: the policy gives almost the same answer each time, with nothing left to compare. Lower "
        "optimizer.lr, or raise grpo.clip_high or grpo.kl_coefficient.",
    ),
)  # fmt: skip


NOISY = 2.0  # nats a token; SmolLM2 has 1.8 at temperature 1, where some answers are right, and 4.3 at 1.3, where nearly none is


def alarms(metrics: Metrics, temperature: float = 1.0, greedy: float | None = None) -> dict[str, str]:
    """Alarms of a rollout, such as entropy collapse: metric -> what is wrong with it.

    Args:
        temperature: at which the answers were drawn.
        greedy: share of the held-out tasks that the first model answers right without drawing, if that was measured.
    """
    found = {}
    if metrics.get("reward") == 0 and metrics.get("entropy", 0.0) > NOISY:
        found["noise"] = (
            f"No answer earned a reward, and the entropy is {metrics['entropy']:.1f} nats a token at grpo.temperature {temperature:g}: "
            "answers are drawn almost at random. "
            + ("" if greedy is None else f"Greedily, the first model answers {greedy:.0%} of the held-out tasks right. ")
            + ("Lower grpo.temperature, to 1 or less, first." if temperature > 1 else "Lower grpo.temperature, or fine-tune first.")
        )
    present = [(each, metrics[each.metric]) for each in ALARMS if each.metric in metrics]
    return found | {each.metric: each.sentence.format(value=value) for each, value in present if each.rings(value)}
