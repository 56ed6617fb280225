"""Chapter 12. An adapter for lm-eval (EleutherAI's evaluation harness): its `LM` over a model of ours.

`loglikelihood`, `loglikelihood_rolling` and `generate_until` give what lm-eval's own class for transformers gives for the same weights.
What a benchmark's text spells like a special token stays text, except in a chat, whose template writes them.
"""

from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from shared.course.errors import CourseError
from shared.finetune.chat.encoding import ChatEncoder
from shared.rl.generation import Drawing
from shared.trainer.evaluation.measures import Subject, generate

NEW_TOKENS = 256  # of an answer at most where a task does not say, as in lm-eval
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # what tasks call it, the first one that is there


class CourseLM(LM):
    """lm-eval's interface to a model.

    Attributes:
        in_chat: requests are chats that `apply_chat_template` has rendered, special tokens and all.
    """

    def __init__(self, subject: Subject):
        super().__init__()
        self.subject, self.scorer, self.in_chat = subject, subject.scorer, False
        self.encoder = ChatEncoder(subject.tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.encoder.encode([text])[0].ids if self.in_chat else self.subject.encode(text)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        pairs = [self.scorer.split(*request.args, self.encode) for request in requests]
        return [tuple(scored) for scored in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self.scorer.rolling([self.encode(request.args[0]) for request in requests])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        found = [""] * len(requests)
        for numbers in groups.values():
            asked = requests[numbers[0]].args[1]
            until = asked.get("until") or []
            stop = {text for text in ([until] if isinstance(until, str) else until) if text} | {self.subject.tokenizer.end}
            new_tokens = next((asked[name] for name in LENGTHS if asked.get(name) is not None), NEW_TOKENS)
            prompts = [self.encode(requests[number].args[0]) for number in numbers]
            answers = generate(self.subject, prompts, new_tokens, stop, drawing_of(asked), seeds=numbers)
            for number, answer in zip(numbers, answers, strict=True):
                found[number] = answer
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.subject.template is None:
            raise CourseError(f"{self.subject.path} has no chat template: leave out --chat.")
        self.in_chat = True
        return self.subject.template.render(self.encoder.guarded(chat_history), generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.subject.template.source if self.subject.template and chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return str(self.subject.path).replace("/", "__")


def drawing_of(asked: dict[str, Any]) -> Drawing:
    """How a task's answers are sampled: greedily, unless it asks for another way."""
    if not asked.get("do_sample") and not asked.get("temperature"):
        return Drawing(temperature=0.0)
    return Drawing(float(asked.get("temperature") or 1.0), asked.get("top_k"), asked.get("top_p"))


def run_tasks(
    subject: Subject, names: list[str], include_path: str | None, limit: int | None, shots: int | None, chat: bool
) -> dict[str, Any]:
    """lm-eval's own results of some of its tasks.

    Args:
        include_path: a folder with tasks beside its own.
        limit: items of a task, at most.
        shots: few-shot examples; None for each task's own number.
    """
    manager = TaskManager(include_path=include_path)
    if missing := [name for name in names if not manager.match_tasks([name])]:
        raise CourseError(f"lm-eval has no task {missing[0]!r}: `lm-eval ls tasks` lists them; --include-path adds a folder of your own.")
    try:
        return simple_evaluate(
            CourseLM(subject), tasks=names, task_manager=manager, limit=limit, num_fewshot=shots, apply_chat_template=chat,
            bootstrap_iters=1000, verbosity="ERROR",
        )  # fmt: skip
    except (OSError, ValueError) as error:  # of `datasets`, which finds no network or no such data
        raise CourseError(f"lm-eval cannot run {', '.join(names)}: {str(error).strip() or type(error).__name__}") from error
