"""Chapter 12. A verifiable reward: whether the last number of an answer is the right one, compared exactly."""

from shared.course.binding import exercise


@exercise("12.number_reward")
def number_reward(answer: str, expected: str) -> float:
    """1.0 where the last number of an answer equals the expected one, as an exact rational, and 0.0 elsewhere. It never raises.

    A number is written with ASCII digits, as

        a whole number       72      007      1,234,567 (a comma in front of every three digits, or none)
        a decimal            0.5     .5       1,234.50          at least one digit follows the point
        a fraction           3/4     of two whole numbers, without spaces

    and a `-` or `+` directly before it belongs to it. A number, with its sign where it has one, does not begin directly behind a letter,
    a digit or an underscore of any script: there is no number in `v2`, and no sign in `10-7`, whose last number is 7. What follows a number
    ends it: the full stop of a sentence, the unit in `72km`, the comma in `5, 6`. A text is read from left to right, each number as long as
    it can be: `1.2.3` holds 1.2 and 3, `1,23` holds 1 and 23, and `1,2345` holds 1 and 2345, because exactly three digits stand behind a
    comma.

    Args:
        answer: what a model wrote, anything at all: empty, very long, in another script.
        expected: one number, written as above; spaces around it do not matter. Something else equals no answer.

    Returns:
        0.0 where the answer has no number, or where its last one or the expected one divides by zero or has over 1,000 characters. The time
        grows with the length of the answer, not with its square.

    >>> number_reward("3 + 4 is 7.", "7"), number_reward("7 or 8", "7"), number_reward("x = 0.50", "1/2"), number_reward("seven", "7")
    (1.0, 0.0, 1.0, 0.0)
    """
