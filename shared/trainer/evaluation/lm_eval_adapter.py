"""Chapter 12. An adapter for lm-eval (EleutherAI's evaluation harness): its `LM` over a model of ours.

`loglikelihood`, `loglikelihood_rolling` and `generate_until` give what lm-eval's own class for transformers gives for the same weights.
What a benchmark's text spells like a special token stays text, except in a chat, whose template writes them.
"""

from functools import cached_property
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from shared.course.errors import CourseError
from shared.finetune.chat.encoding import ChatEncoder
from shared.model.hf.files import GENERATION, read_json
from shared.rl.generation import Drawing
from shared.trainer.evaluation.measures import Subject, generate

NEW_TOKENS = 256  # of an answer at most where a task does not say, as in lm-eval
SAMPLED = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # what tasks call it, the first one that is there
READ = ("until", *LENGTHS, *SAMPLED)  # what a task may say of generation


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
        """The ids of a request. A chat too is put after the tokenizer's beginning token, if it adds one and the template has not."""
        if not self.in_chat:
            return self.subject.encode(text)
        ids, (beginning, before, after) = self.encoder.encode([text])[0].ids, self.habit
        return ids if text.startswith(beginning) else [*before, *ids, *after]

    @cached_property
    def habit(self) -> tuple[str, list[int], list[int]]:
        """The name of the token before an empty text, and the ids that the tokenizer puts before a text, and after it."""
        bare, whole = self.subject.tokenizer.encode("x"), self.subject.encode("x")
        place = next(start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
        beginning = self.subject.tokenizer.decode([self.scorer.prefix_id], keep_special=True)
        return beginning, whole[:place], whole[place + len(bare) :]

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
            answers = generate(self.subject, prompts, new_tokens, stop, self.drawing_of(asked), seeds=numbers)
            for number, answer in zip(numbers, answers, strict=True):
                found[number] = answer
        return found

    def drawing_of(self, asked: dict[str, Any]) -> Drawing:
        """How a task's answers are sampled: greedily, unless it says `do_sample` or a temperature alone. The model's own repetition penalty
        counts where the task has none, for greedy answers too.

        Raises:
            CourseError: the task asks for what is not built here, such as beams.
        """
        if strange := [f"{name} {value!r}" for name, value in asked.items() if name not in READ and value not in (None, 0, 1, False)]:
            raise CourseError(f"The task asks for generation with {', '.join(strange)}, which is not built here: take lm-eval's own class.")
        penalty = float(asked.get("repetition_penalty") or self.penalty)
        temperature = float(asked.get("temperature") or 0.0)
        if not asked.get("do_sample", temperature > 0):
            return Drawing(temperature=0.0, repetition_penalty=penalty)
        return Drawing(temperature or 1.0, asked.get("top_k"), asked.get("top_p"), asked.get("min_p"), penalty)

    @cached_property
    def penalty(self) -> float:
        """The repetition penalty of the model's generation_config.json."""
        file = self.subject.path / GENERATION
        return float(read_json(file).get("repetition_penalty") or 1.0) if file.is_file() else 1.0

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.subject.template is None:
            raise CourseError(f"{self.subject.path} has no chat template: leave out --chat.")
        self.in_chat, messages = True, self.encoder.guarded(chat_history)
        text = self.subject.template.render(messages, generation_prompt=add_generation_prompt)
        return text if add_generation_prompt else up_to_answer(text, messages[-1]["content"])

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.subject.template.source if self.subject.template and chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return str(self.subject.path).replace("/", "__")


def up_to_answer(text: str, begun: str) -> str:
    """A chat whose last answer is only begun (a task's `gen_prefix`), up to where the model continues it."""
    place = text.rindex(begun.strip())
    whole = begun.lstrip()  # with its spaces at the end, where the template keeps them
    return text[:place] + (whole if text.startswith(whole, place) else begun.strip())


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
