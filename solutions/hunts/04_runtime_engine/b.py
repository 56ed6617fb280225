"""Checkpoints on a disk that forgets. The operating system writes back when it likes: after a power cut the disk has of a file what was
forced by then, and of the changes to names since the folder was last forced all, none or some. The disk is played here, to cut it then."""

import hashlib
import json
from collections.abc import Iterator


class Disk:
    """One folder. cuts: all that a power cut could have left, at each moment so far."""

    def __init__(self) -> None:
        self.contents: dict[int, str] = {}  # by the file's own number, as the operating system has them
        self.names: dict[str, int] = {}
        self.forced: dict[int, str] = {}
        self.forced_names: dict[str, int] = {}
        self.cuts: list[dict[str, str]] = []

    def write(self, name: str, text: str) -> None:
        self.names[name] = len(self.contents)
        self.contents[self.names[name]] = text
        self.cut()

    def rename(self, name: str, new: str) -> None:
        self.names[new] = self.names.pop(name)
        self.cut()

    def remove(self, name: str) -> None:
        del self.names[name]
        self.cut()

    def force(self, name: str) -> None:
        self.forced[self.names[name]] = self.contents[self.names[name]]
        self.cut()

    def force_names(self) -> None:
        self.forced_names = dict(self.names)
        self.cut()

    def cut(self) -> None:
        here = self.names.values()
        removed_alone = {name: number for name, number in self.forced_names.items() if name in self.names or number in here}
        for names in (self.names, self.forced_names, removed_alone):
            self.cuts.append({name: self.forced.get(number, "") for name, number in names.items()})


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save(disk: Disk, step: int, keep: int = 1) -> None:
    """A checkpoint in one file. Afterwards `keep` of them are left."""
    text = json.dumps({"step": step, "weights": [step / 2, step / 3]})
    disk.write("partial", checksum(text) + text)
    disk.force("partial")
    disk.rename("partial", f"step-{step:06}")
    disk.force_names()
    for name in sorted(name for name in disk.names if name.startswith("step-"))[:-keep]:
        disk.remove(name)


def sound(files: dict[str, str]) -> Iterator[int]:
    """The steps of the checkpoints that are whole."""
    for name, content in sorted(files.items()):
        if name.startswith("step-") and content[:16] == checksum(content[16:]):
            yield json.loads(content[16:])["step"]


def newest_after_cuts(steps: list[int], keep: int = 1) -> dict[int, list[int]]:
    """For each save the newest sound checkpoint after a power cut at each of its moments; 0 where none is left."""
    disk, found = Disk(), {}
    for step in steps:
        disk.cuts.clear()
        save(disk, step, keep)
        found[step] = [max(sound(files), default=0) for files in disk.cuts]
    return found


def main() -> None:
    print("while step is saved   power cuts   newest sound checkpoint afterwards: smallest, largest   none is left")
    for step, newest in newest_after_cuts([100, 200, 300, 400]).items():
        print(f"{step:>19}   {len(newest):>10}   {min(newest):>48}, {max(newest):>7}   {newest.count(0):>12}")


if __name__ == "__main__":
    main()
