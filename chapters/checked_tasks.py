"""Small tasks whose answers a program checks, in ids of their own: what chapter 12's run and study teach.

    sums         123+456=                                                                    579
    counts       How many words are there in: door, lamp?                                    2
    functions    Write a Python function area that returns the product of x and y.           def area(x, y): ...

Sums are written with a token for each digit; the other two are the trainer's own tasks (`shared.rl.tasks`), with a token for each word and
sign. A function is right where the sandbox, which runs it, finds that it returns what it should.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple, Protocol

ZERO, PLUS, EQUALS, END = 1, 11, 12, 13  # token ids of sums: a digit is ZERO and its value; 0 is padding
SIGNS = {PLUS: "+", EQUALS: "=", END: "."}
HELD_OUT = 500  # sums that nothing is trained on
HELD_OUT_WRITTEN = 200  # counts or functions; there are not many more functions
TRAINING = 4096  # tasks that GRPO gives, and that a vocabulary is taken from
PIECE = re.compile(r" ?\w+| ?[^\w\s]|\s+")  # a word or sign with the space before it, or other space
FUNCTION = re.compile(r"Write a Python function (\w+) that returns (.+) (\w+) and (\w+)\.")


class Asked(NamedTuple):
    """One task. prompt: ids. answer: ids of a right one, without its end. wanted: what the verifier compares an answer with."""

    prompt: list[int]
    answer: list[int]
    wanted: str


class CheckedTasks(Protocol):
    """Tasks of one kind and seed.

    Attributes:
        vocab_size, end: of the ids; `end` stands behind an answer.
        positions: that a model needs.
        new_tokens: of the longest right answer and more, so that an answer may also be too long.
        longest: tokens of a prompt with its answer, at most.
        held_out: tasks that nothing is trained on.
    """

    vocab_size: int
    end: int
    positions: int
    new_tokens: int
    longest: int
    held_out: list[Asked]

    def others(self) -> Iterator[Asked]:
        """The tasks to train on, from the first on, without end."""

    def text_of(self, ids: Sequence[int]) -> str: ...

    def judge(self, tasks: Sequence[Asked], answers: Sequence[str]) -> list[float]:
        """1.0 for each right answer, 0.0 for any other."""

    def close(self) -> None: ...


def tasks_of(task: str, digits: int, seed: int) -> "closing[CheckedTasks]":
    """The tasks of a configuration, for `with`: functions have a sandbox to close."""
    return closing(Sums(digits, seed) if task == "sums" else Written(task, seed))


def training_tasks(tasks: CheckedTasks) -> list[Asked]:
    return list(islice(tasks.others(), TRAINING))


def reward_of(tasks: CheckedTasks, training: Sequence[Asked]) -> Callable[[Sequence[Any]], list[float]]:
    """The verifier as a reward of samples, whose prompts are numbers of `training`. An answer must have ended by itself."""

    def reward(samples: Sequence[Any]) -> list[float]:
        ended = [sample for sample in samples if sample.completion.ended]
        found = iter(tasks.judge([training[each.prompt] for each in ended], [tasks.text_of(each.completion.said) for each in ended]))
        return [next(found) if sample.completion.ended else 0.0 for sample in samples]

    return reward


# Sums.


def ids_of(text: str) -> list[int]:
    return [next((token for token, sign in SIGNS.items() if sign == letter), ZERO + ord(letter) - ord("0")) for letter in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join(SIGNS.get(token) or (str(token - ZERO) if ZERO <= token < PLUS else "?") for token in ids)


class Sums:
    """Sums of two numbers of up to `digits` digits, whose verifier is chapter 12's exercise."""

    vocab_size, end, positions = 14, END, 32

    def __init__(self, digits: int, seed: int):
        self.most, self.seed, self.new_tokens, self.longest = 10**digits, seed, digits + 3, 3 * digits + 5
        self.count = min(HELD_OUT, self.most**2 // 10)
        self.held_out = list(map(self.asked, islice(self.drawn(), self.count)))

    def drawn(self) -> Iterator[tuple[int, int]]:
        draw = random.Random(self.seed)
        while True:
            yield draw.randrange(self.most), draw.randrange(self.most)

    def others(self) -> Iterator[Asked]:
        pairs = self.drawn()
        kept = set(islice(pairs, self.count))
        return (self.asked(pair) for pair in pairs if pair not in kept)

    def asked(self, pair: tuple[int, int]) -> Asked:
        right = str(sum(pair))
        return Asked(ids_of("+".join(map(str, pair)) + "="), ids_of(right), right)

    def text_of(self, ids: Sequence[int]) -> str:
        return text_of(ids)

    def judge(self, tasks: Sequence[Asked], answers: Sequence[str]) -> list[float]:
        from shared.rl import number_reward

        return [number_reward.number_reward(answer, task.wanted) for task, answer in zip(tasks, answers, strict=True)]

    def close(self) -> None: ...


# Tasks that the trainer makes, in words.


class Written:
    """The trainer's tasks `count` or `function`. A program that several answers share is run once."""

    positions = 64

    def __init__(self, task: str, seed: int):
        from shared.rl.code_reward import CodeReward
        from shared.rl.tasks import MadeTasks

        self.made = MadeTasks(kinds=({"counts": "count", "functions": "function"}[task],), seed=seed)
        self.code = CodeReward(workers=1)
        both = [*islice(self.drawn(True), HELD_OUT_WRITTEN), *islice(self.drawn(False), TRAINING)]
        self.pieces = sorted({piece for each in both for text in (each.prompt, demonstration(each)) for piece in PIECE.findall(text)})
        self.ids = {piece: number for number, piece in enumerate(self.pieces, 1)}  # 0 is padding
        self.end, self.vocab_size = len(self.pieces) + 1, len(self.pieces) + 2
        asked = list(map(self.asked, both))
        self.held_out = asked[:HELD_OUT_WRITTEN]
        self.new_tokens = max(len(each.answer) for each in asked) + 3
        self.longest = max(len(each.prompt) + len(each.answer) for each in asked) + 2

    def drawn(self, held_out: bool) -> Iterator[Any]:
        from shared.rl.tasks import draw_tasks

        return draw_tasks(self.made, held_out)

    def others(self) -> Iterator[Asked]:
        return map(self.asked, self.drawn(False))

    def asked(self, task: Any) -> Asked:
        prompt, answer = ([self.ids[piece] for piece in PIECE.findall(text)] for text in (task.prompt, demonstration(task)))
        return Asked(prompt, answer, task.answer)

    def text_of(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token - 1] if 0 < token < self.end else "?" for token in ids)

    def judge(self, tasks: Sequence[Asked], answers: Sequence[str]) -> list[float]:
        from shared.rl.verifiers import VERIFIERS

        pairs = [(answer, task.wanted) for task, answer in zip(tasks, answers, strict=True)]
        if self.made.kinds == ("count",):
            return [VERIFIERS["number"](*pair) for pair in pairs]
        once = list(dict.fromkeys(pairs))
        found = dict(zip(once, self.code.judge([answer for answer, _ in once], [wanted for _, wanted in once]), strict=True))
        return [found[pair] for pair in pairs]

    def close(self) -> None:
        self.code.close()


def demonstration(task: Any) -> str:
    """A right answer to a task of `shared.rl.tasks`; for a function, the program that chapter 10 gives."""
    from shared.finetune.instructions import OPERATORS

    if task.kind == "count":
        return task.answer
    name, said, one, other = FUNCTION.fullmatch(task.prompt).groups()
    return f"def {name}({one}, {other}):\n    return {one} {OPERATORS[said]} {other}"
