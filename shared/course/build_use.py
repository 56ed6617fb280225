"""Floor 0. A learner's build in a run script: its functions, where every stage passed on its present text.

A run script asks after `launch`, which has chosen the implementation:

    build = passed_build("01")
    print(build_line("01"))
    if build is not None:
        model = build.new_model(...)
"""

from shared.course import binding, build_check
from shared.course.builds import Build, find_build, fingerprint
from shared.course.errors import BrokenFile
from shared.course.paths import shown
from shared.course.progress import Progress
from shared.course.report import count
from shared.course.stubs import BodyFile


def passed_build(number: str) -> build_check.Functions | None:
    """The functions of a chapter's build, where the run uses the learner's parts and all stages passed on this very text; else None.

    Args:
        number: the chapter, as in "01".

    Raises:
        BrokenFile: the file's top level raises, though its stages passed.
    """
    build, file, passed = _build_of_run(number)
    if file is None or len(passed) < len(build.stages):
        return None
    return build_check.load(file, build.adapters)


def build_line(number: str) -> str:
    """One line for a run's header: whether the learner's build runs, and if not, why."""
    build, file, passed = _build_of_run(number)
    if binding.current_choice().implementation == "reference":
        return f"{build.id} is not asked for: run with IMPL=mine (`--impl mine`) to use yours."
    if file is None or not build.attempted(file):
        return f"{build.id} is not written yet: this runs without it."
    if len(passed) < len(build.stages):
        done = f"{len(passed)} of {count(len(build.stages), 'stage')} passed on the present text of {shown(file.path)}"
        return f"{build.id} is not used: {done}. `course check {build.id}` checks the others."
    return f"{build.id} runs: {shown(file.path)}, all {count(len(build.stages), 'stage')} passed."


def unused_line(number: str, why: str) -> str:
    """One line for the header of a run that has no place for its chapter's build, whether or not it passed."""
    return f"{number}.build is not used by this run: {why}"


def _build_of_run(number: str) -> tuple[Build, BodyFile | None, list[str]]:
    """The build, the learner's file where the run may use it and Python can read it, and the stages that passed on its text."""
    build, _ = find_build(f"{number}.build")
    choice = binding.current_choice()
    if choice.implementation == "reference":
        return build, None, []
    try:
        file = BodyFile.read(build.file(choice.workspace))
    except BrokenFile:
        return build, None, []
    record, text = Progress(choice.workspace).read(), fingerprint(file)
    return build, file, [stage.name for stage in build.stages if record.get(stage.id, {}).get("passed") == text]
