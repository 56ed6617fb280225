"""Chapter 11. Reward functions for reinforcement learning: any function of a prompt and an answer, or the scores of a reward model.

A reward that raises, or that gives no finite number, ends the run with a sentence that names the answer: counted as 0, it would teach
something. None says that a reward is not for this prompt.
"""

import math
import struct
from collections.abc import Callable, Sequence

from shared.course.errors import CourseError
from shared.preference.rollout import Sample

Reward = Callable[[Sequence[Sample]], Sequence[float | None]]
SHOWN = 60  # characters of a prompt in an error message


def reward_of_texts(function: Callable[[str, str], float], texts: Sequence[str], decode: Callable[[list[int]], str]) -> Reward:
    """A reward from a function of two texts.

    Args:
        function: function(prompt, answer) -> reward.
        texts: of the prompts, by their numbers.
        decode: the ids of an answer, without the token that ended it, to text.
    """

    def reward(samples: Sequence[Sample]) -> list[float]:
        found = []
        for sample in samples:
            answer = decode(sample.completion.said)
            try:
                found.append(function(texts[sample.prompt], answer))
            except Exception as error:
                shown = f"{texts[sample.prompt][:SHOWN]!r} and the answer {answer[:SHOWN]!r}"
                raise CourseError(f"The reward {name_of(function)} failed on the prompt {shown}: {describe(error)}. Mend it.") from error
        return found

    reward.__name__ = name_of(function)
    return reward


def reward_all(reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
    """The rewards of some answers; None where none applies."""
    scores = numbers_of(reward, samples)
    for sample, score in zip(samples, scores, strict=True):
        if score is not None and not is_finite(score):
            raise CourseError(
                f"The reward {name_of(reward)} gave {score} for an answer to prompt {sample.prompt}: a finite number is needed (in "
                "float32). Mend it."
            )
    return scores


def numbers_of(reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
    """The numbers that a reward function returns for some answers, NaN and infinity included, or None.

    Raises:
        CourseError: the reward raised, or gave another number of rewards.
    """
    try:
        scores = [None if score is None else float(score) for score in reward(samples)]
    except CourseError:
        raise
    except Exception as error:
        raise CourseError(f"The reward {name_of(reward)} failed on answers to the prompts from {samples[0].prompt} on: {describe(error)}. "
                          "Mend it.") from error  # fmt: skip
    if len(scores) != len(samples):
        raise CourseError(f"The reward {name_of(reward)} gave {len(scores)} numbers for {len(samples)} answers: return one for each.")
    return scores


def is_finite(value: float) -> bool:
    """Whether a number is finite in float32, as a rollout holds it: 1e39 is not."""
    try:
        return math.isfinite(*struct.unpack("f", struct.pack("f", value)))
    except OverflowError:
        return False


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")
