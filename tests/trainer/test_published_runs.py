"""Floor 12: the constants of the cards are those of the rows that are said to fix them, and the page has what the planner predicts now."""

from dataclasses import replace

import pytest
from published_runs import CALIBRATION, PAGE, calibrated, korthikanti, megatron, memory_table, others, predicted

from shared.trainer.planner.hardware import DEVICES

RUNS = [*megatron(), *others(), *korthikanti()]
QUICK = [run for run in RUNS if "pp" not in run.layout]


@pytest.mark.parametrize("device, run", [(run.hardware.device, run) for run in (RUNS[0], QUICK[4])], ids=["A100", "H100"])
def test_a_cards_efficiency_is_fixed_by_its_row(device, run):
    assert run.name in CALIBRATION or run.source in CALIBRATION
    assert device.efficiency == pytest.approx(calibrated(run), abs=1e-3)
    assert calibrated(replace(run, figure=0.9 * run.figure)) < device.efficiency - 0.02


def test_cards_with_one_chip_have_one_constant():
    assert DEVICES["A100"].efficiency == DEVICES["A100-40GB"].efficiency and DEVICES["H100"].efficiency == DEVICES["H200"].efficiency


@pytest.mark.parametrize("run", QUICK, ids=lambda run: f"{run.name} {run.layout}")
def test_the_page_has_the_predictions(run):
    line = f"| {run.layout} | {run.figure:,g} {run.unit} | {predicted(run)[1]:,.0f} |"
    assert line in PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_memory():
    assert "\n".join(memory_table()) in PAGE.read_text(encoding="utf-8")
