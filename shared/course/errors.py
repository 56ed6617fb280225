"""Floor 0. Errors for the reader: each message says what, where, and what to do."""


class CourseError(Exception):
    """Something that the reader can put right. Shown as its message, without a traceback.

    on_all_ranks: whether every rank of a run raises the same error; then one rank of each machine shows it.
    """

    on_all_ranks = False


class SettingError(CourseError, ValueError):
    """A setting that is refused, named by its key."""


def nearest_multiples(count: int, unit: int) -> str:
    """The multiples of `unit` below and above a count that is none, for a sentence: "6 or 8"; "4" where the one below is 0."""
    lower = count - count % unit
    return f"{lower} or {lower + unit}" if lower else f"{unit}"


class SignatureDiffers(CourseError):
    """A body whose signature is not its contract's."""


class NotWritten(CourseError):
    """A part that `mine` needs and that the learner has not written."""


class BrokenFile(CourseError):
    """A learner's file that Python cannot load."""
