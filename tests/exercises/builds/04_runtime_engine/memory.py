"""The budget of memory of a save, and of a checkpoint's size."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from shared.course.checking import Case

from .disk import bytes_in, in_child, somewhere
from .pieces import WITHIN, Any, Results, Said, budget, momentum, none, words, world


class Wide(nn.Module):
    """16 weights of a megabyte each, and a step that costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(1 << 18) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight[0] for weight in self.weights]).sum() * x.sum()

    def fill(self, seed: int) -> None:
        pass


def wide(model: nn.Module, batch: Results) -> Any:
    return model(batch["x"]), 1, {}


def peak_of(work: Callable[[], None]) -> int:
    """Bytes by which this process becomes larger at most, as the kernel counts them."""

    def read(name: str) -> int:
        return int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)))

    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS:")
    work()
    return (read("VmHWM:") - before) * 1024


def copies(held: int, written: int) -> Said:
    """In words: what exactly the kernel counts differs from run to run."""
    return WITHIN if held <= written // 4 else Said("about a copy of what is written" if held < 1.4 * written else "more than one copy")


def memory_case() -> Case:
    """In a child, whose memory nobody else uses. The second save is measured, which finds what the first one loaded."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            told = folder.parent.parent / "told"

            def work() -> None:
                made = world(adapters, folder, model=Wide, optimizer=momentum, schedule=none, objective=wide)
                adapters.run(made.engine, 1)
                adapters.save(made.engine)
                adapters.run(made.engine, 2)
                told.write_text(str(peak_of(lambda: adapters.save(made.engine))))

            code = in_child(work)
            if code:
                return {"copies in memory": Said(f"the save ended with {code}")}
            tensors = 2 * 16 * (1 << 20)
            size = bytes_in(folder) // 2 - tensors
            return {
                "copies in memory": copies(int(told.read_text()), tensors),
                "beside the tensors": budget(size, 1 << 16, "bytes"),
            }

    given = {"weights": "16 of 1 MiB, float32", "optimizer": "SGD with momentum", "checkpoint": "32 MiB"}
    return words("budget", "memory and size of a save", 4, given, {"copies in memory": WITHIN, "beside the tensors": WITHIN}, observe)
