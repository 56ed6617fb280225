"""Floor 0. What the fork server imports before it forks checks and ranks: torch and what every check needs, and nothing of the core, which
is bound in the child."""

from shared.course.importing import all_stays

with all_stays():
    import cloudpickle  # noqa: F401
    import torch  # noqa: F401

    import shared.course.judging
    import shared.course.running  # noqa: F401
