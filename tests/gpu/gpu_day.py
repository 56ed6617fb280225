"""The first minute of `make gpu`: which cards there are and how they are linked, what will run, and the memory that the planner foresees.

The same lines go into the table to paste, since a figure means little without driver, power limit, lanes and link.
"""

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "12_grpo"
ASKED = {
    "name": "name", "driver": "driver_version", "power limit W": "power.limit", "memory MiB": "memory.total",
    "PCIe generation": "pcie.link.gen.max", "lanes": "pcie.link.width.current",
}  # fmt: skip
LINKS = {"NV": "NVLink", "PIX": "PCIe, one bridge", "PXB": "PCIe, several bridges", "PHB": "PCIe over the CPU", "NODE": "PCIe over the CPU"}
LINKS |= {"SYS": "PCIe over two CPUs"}
Ask = Callable[[Sequence[str]], str]


def nvidia_smi(words: Sequence[str]) -> str:
    """What nvidia-smi prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def cards(ask: Ask = nvidia_smi) -> list[dict[str, str]]:
    """Each card by what was asked of it; nothing where the driver does not answer."""
    lines = ask([f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader,nounits"]).strip().splitlines()
    return [dict(zip(ASKED, (field.strip() for field in line.split(",")), strict=False)) for line in lines]


def link(ask: Ask = nvidia_smi) -> str:
    """How the first two cards are linked, as `nvidia-smi topo -m` says; NVLink with the number of its links."""
    row = next((line.split() for line in ask(["topo", "-m"]).splitlines() if re.match(r"\s*GPU0\s+X\s", line)), [])
    code = row[2] if len(row) > 2 else ""
    kind = code.rstrip("0123456789")
    return f"{LINKS[kind]} ({code})" if kind in LINKS else "not known"


def foreseen(cards: int) -> list[tuple[str, str]]:
    """What the planner foresees on a card of each shipped configuration for two RTX 3090s, or why it cannot; nothing for one card."""
    from shared.course.errors import CourseError
    from shared.trainer.planner.memory import run_memory
    from shared.trainer.planner.opening import open_planned

    files = ("", "_sft", "_lora", "_qlora", "_grpo", "_dpo", "_fsdp2", "_tp2", "_pp2", "_ep2") if cards > 1 else ()
    told = []
    for name in files:
        path = CHAPTER / f"two_3090s{name}.yaml"
        try:
            told.append((path.name, f"{max(each.peak for each in run_memory(open_planned(path), usable=22.5e9)) / 1e9:5.1f} GB"))
        except CourseError as error:  # such as a model that is half downloaded: the slices need none
            told.append((path.name, f"not known: {error}"))
    return told


def about(ask: Ask = nvidia_smi) -> str:
    """The cards as Markdown, for the top of the table."""
    found = cards(ask)
    if not found:
        return "nvidia-smi does not answer: driver, power limit, lanes and link are not known.\n"
    lines = [f"| {' | '.join(['card', *ASKED])} |", "|" + "---|" * (len(ASKED) + 1)]
    lines += [f"| {' | '.join([str(number), *card.values()])} |" for number, card in enumerate(found)]
    return "\n".join(lines) + (f"\n\nLink between the first two: {link(ask)}.\n" if len(found) > 1 else "\n")


def opening(names: Sequence[str], sentence_of: Callable[[str], str], minutes: float, ask: Ask = nvidia_smi) -> str:
    """What is there, and what comes now. names: of the slices that will run, in their order."""
    parts = [about(ask), f"{len(names)} slices, at most {minutes:g} minutes each:"]
    parts += [f"  {number}. {name:12} {sentence_of(name)}" for number, name in enumerate(names, 1)]
    if memory := foreseen(len(cards(ask))):
        parts += ["", "Foreseen on each card, to compare with memory/gpu_peak_gib of your runs (1 GiB is 1.074 GB):"]
        parts += [f"  {name:24} {said}" for name, said in memory]
    return "\n".join(parts) + "\n"
