"""Chapter 04. Validation of a checkpoint's content: is it consistent? Checked before any state of a run is changed.

Checksums say that the bytes are what was written, and not that they are a checkpoint: a writer may have a bug, the folder may hold a file
of another save, a user may have edited a file and its checksum. So `state.json` has a table of contents (each tensor's dtype and shape,
the names of the parts), and what was read is compared with it.

An inconsistent checkpoint is *damaged*: the run resumes from the previous one. A consistent one that does not fit the run, because of
another hidden size for instance, is refused: another run was started in this folder. An older checkpoint would fit no better, and the next
save would delete the newer one.

Left out on purpose: values. Wrong numbers in the right places are a checkpoint.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.course.errors import CourseError
from shared.course.typed import shown

FORMAT = 2
Described = dict[str, list]  # name of a tensor -> its dtype and its shape


class CheckpointError(CourseError):
    """A checkpoint that cannot be written or read; the message says which, why, and what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is incomplete, was changed, or is inconsistent."""

    @classmethod
    def of(cls, folder: Path, what: str) -> "DamagedCheckpoint":
        return cls(f"The checkpoint {folder} is damaged: {what}")


RANDOM_STATE = {"python": list, "numpy": dict}
STATE_TYPES = {
    "format": int, "step": int, "notes": dict, "parts": {str: dict}, "random": RANDOM_STATE,
    "optimizer": {"values": {str: dict}, "groups": [{"lr": float, "names": [str]}]},
    "contents": {"parts": [str], "tensors": {"weights": dict, "optimizer": dict}},
}  # fmt: skip


def misfit(value: Any, wanted: Any, place: str) -> str | None:
    """What is wrong with a value from JSON, and where; None if it has the wanted type.

    Args:
        wanted: a type; [type of each entry]; {str: type of each value}; or {key: type}, where other keys may stand too.
    """
    if isinstance(wanted, type):
        kinds = (int, float) if wanted is float else wanted
        right = isinstance(value, kinds) and not (wanted in (int, float) and isinstance(value, bool))
        return None if right else f"{place} is {shown(value)}, and should be of type {wanted.__name__}"
    if not isinstance(value, type(wanted)):
        return f"{place} is {shown(value)}, and should be of type {type(wanted).__name__}"
    if isinstance(wanted, list):
        entries = [(entry, wanted[0], f"{place}[{number}]") for number, entry in enumerate(value)]
    elif str in wanted:
        entries = [(entry, wanted[str], f"{place}.{key}") for key, entry in value.items()]
    else:
        if absent := [key for key in wanted if key not in value]:
            return f"{place} has no {absent[0]!r}"
        entries = [(value[key], kind, f"{place}.{key}") for key, kind in wanted.items()]
    return next((wrong for entry in entries if (wrong := misfit(*entry))), None)


def problem_of(state: Any, step: int) -> str | None:
    """What is wrong with the content of a `state.json`, as a message; None if it is consistent.

    Raises:
        CheckpointError: it is of another format, which is no damage.
    """
    if (wrong := misfit(state, {"format": int}, "the state")) is None and state["format"] != FORMAT:
        raise CheckpointError(f"has the format {state['format']}, and this version reads {FORMAT}: use the version that wrote it.")
    if wrong := wrong or misfit(state, STATE_TYPES, "the state"):
        return wrong
    if state["step"] != step:
        return f"it is the state after step {state['step']}"
    if differing := sorted(set(state["parts"]) ^ set(state["contents"]["parts"])):
        return f"its parts and its table of contents differ in {', '.join(differing)}"
    names = [name for group in state["optimizer"]["groups"] for name in group["names"]]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        return f"its optimizer has {twice[0]} twice"
    tensors = state["contents"]["tensors"]
    stepped = {entry.partition("/")[2] for entry in tensors["optimizer"]} | set(state["optimizer"]["values"])
    if strangers := sorted(stepped - set(names)):
        return f"it holds an optimizer's state of {strangers[0] or 'nothing'}, which no group has"
    return None


def table_entry(dtype: torch.dtype, shape: Sequence[int]) -> list[Any]:
    """A tensor in the table of contents: its dtype's name and its shape.

    >>> table_entry(torch.float32, (2, 3))
    ['float32', [2, 3]]
    """
    return [str(dtype).removeprefix("torch."), list(shape)]


def difference(found: Described, expected: Any) -> str | None:
    """How tensors that were read differ from the table of contents; None where they do not."""
    if not isinstance(expected, dict):
        return "its table of contents does not list its tensors"
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            here, there = (f"{entry[0]} {entry[1]}" if is_entry(entry) else "not there" for entry in (found.get(name), expected.get(name)))
            return f"{name} is {here}, and {there} in its table of contents"
    return None


def is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2


def unlisted(folder: Path, files: Iterable[str]) -> str | None:
    """A file of tensors that the manifest does not list: it was put there later, and would be read with the others."""
    return next((path.name for path in sorted(folder.glob("*.safetensors")) if path.name not in files), None)
