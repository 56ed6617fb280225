"""Chapter 12. A verifiable reward: whether the last number of an answer is the right one, compared exactly."""

from shared.course.binding import exercise


@exercise("12.number_reward")
def number_reward(answer: str, expected: str) -> float:
    """1.0 where the last number of an answer equals the expected one, as an exact rational, and 0.0 elsewhere. It never raises.

    What a number is need not be invented: `NUMBER.findall(text)` gives the numbers of a text, from left to right, as they are written, such
    as "72", "-1,234.50", ".5" or "3/4", and `NUMBER.fullmatch(text)` is None unless the text is one number as a whole.

    Args:
        answer: what a model wrote, anything at all: empty, very long, in another script.
        expected: one number; spaces around it do not matter. Something else equals no answer.

    Returns:
        0.0 where the answer has no number, or where its last one or the expected one divides by zero or has over 1,000 characters. The time
        grows with the length of the answer, not with its square.

    >>> number_reward("3 + 4 is 7.", "7"), number_reward("7 or 8", "7"), number_reward("x = 0.50", "1/2"), number_reward("seven", "7")
    (1.0, 0.0, 1.0, 0.0)
    """
