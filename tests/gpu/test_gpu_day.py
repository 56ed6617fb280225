"""The first minute of `make gpu`: what nvidia-smi prints is read right, and where it prints nothing the runner still begins."""

import gpu_day
import pytest
import run as command
from slices import SLICES

from shared.course.errors import CourseError

QUERY = "NVIDIA GeForce RTX 3090, 580.95.05, 350.00, 24576, 4, 16\nNVIDIA GeForce RTX 3090, 580.95.05, 280.00, 24576, 4, 8\n"
TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{0}\t0-23\nGPU1\t{0}\t X \t0-23\n\nLegend:\n\n  X    = Self\n"


def answers(code):
    return lambda words: QUERY if words[0].startswith("--query") else TOPOLOGY.format(code)


@pytest.mark.parametrize("code, said", [("NV4", "NVLink (NV4)"), ("PHB", "PCIe over the CPU (PHB)"), ("XYZ", "not known")])
def test_driver_power_limit_lanes_and_link_are_read(code, said):
    first, second = gpu_day.cards(answers(code))
    assert (first["driver"], first["power limit W"], second["power limit W"], second["lanes"]) == ("580.95.05", "350.00", "280.00", "8")
    assert gpu_day.link(answers(code)) == said and f"Link between the first two: {said}." in gpu_day.about(answers(code))


def test_the_opening_names_every_slice_in_order_and_what_is_foreseen():
    text = gpu_day.opening(SLICES, lambda name: f"Shows {name}.", 8, answers("PHB"))
    assert [text.index(f"Shows {name}.") for name in SLICES] == sorted(text.index(f"Shows {name}.") for name in SLICES)
    assert SLICES[0] == "trainer"  # what most users need first
    assert "two_3090s_qlora.yaml" in text and gpu_day.foreseen(1) == []


def test_without_nvidia_smi_the_opening_says_so():
    text = gpu_day.opening(SLICES[:1], lambda name: "Shows.", 8, lambda words: "")
    assert text.startswith("nvidia-smi does not answer") and "Foreseen" not in text


def test_the_command_opens_with_it_and_puts_it_above_the_table(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_day, "nvidia_smi", lambda words: "")
    monkeypatch.setattr(command.gpu_runner.Runner, "result", lambda runner, name, again=False: {"state": "started"})
    assert command.main(["--device", "cpu", "--size", "small", "--slice", "muon", "--output", str(tmp_path)]) == 0
    assert "1 slices, at most 8 minutes each" in capsys.readouterr().out
    assert (tmp_path / "table.md").read_text(encoding="utf-8").startswith("nvidia-smi does not answer")


def test_a_file_whose_memory_cannot_be_foreseen_says_why_and_the_others_are_foreseen(monkeypatch):
    def opened(path):
        raise CourseError("half a model")

    monkeypatch.setattr("shared.trainer.planner.opening.open_planned", opened)
    assert {said for _, said in gpu_day.foreseen(2)} == {"not known: half a model"}
