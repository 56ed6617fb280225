"""Each mode in each layout runs to its report, or is refused before its first step."""

import json

import pytest
from preferring_runs import preferring_config
from rich.console import Console
from tuned_runs import tuned_config

from shared.course.errors import CourseError
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.trainer.run import train_model

LORA = ("adapter.rank=4", "adapter.targets=[all-linear]", "optimizer.name=adamw")
TUNED = {"sft": (), "lora": LORA, "dora": (*LORA, "adapter.decomposed=true"), "qlora": (*LORA, "adapter.base=nf4"),
         "prompt": ("adapter.kind=prompt", "adapter.virtual_tokens=5", "optimizer.name=adamw")}  # fmt: skip
MODES = (*TUNED, "reward", "dpo", "ppo", "grpo")
LAYOUTS = ("dp2", "dp2_zero1", "fsdp2", "tp2", "tp2_sp", "cp2", "pp2")
FAST = {("dpo", "fsdp2"), ("grpo", "tp2")}


def rows() -> list:
    every = [(mode, layout) for mode in MODES for layout in LAYOUTS]
    return [pytest.param(*each, marks=[] if each in FAST else pytest.mark.slow, id="-".join(each)) for each in every]


@pytest.mark.parametrize(("mode", "layout"), rows())
def test_a_mode_runs_to_its_report_in_a_layout_or_is_refused_before_its_first_step(tmp_path, base, mode, layout):
    parallel = parse_layout(layout)
    words = ["steps=2", "schedule.warmup_steps=0", "schedule.decay_steps=0", "model.hidden_dropout=0.0"]  # threads share its draws
    words += [f"parallel.{name}={str(value).lower()}" for name, value in vars(parallel).items() if value != getattr(type(parallel)(), name)]
    run = tmp_path / "run"
    try:
        make = tuned_config if mode in TUNED else lambda *given: preferring_config(*given[:2], mode, *given[2:])
        config = make(tmp_path, base, *words, *TUNED.get(mode, ()))
        results = run_threads(lambda world: train_model(config, Console(quiet=True), world), parallel.ranks)[0]
    except (CourseError, SystemExit) as error:  # or by the command line
        assert not (run / "metrics.jsonl").exists(), f"it trained, and then: {error}"
        return
    assert json.loads((run / "results.json").read_text())["summary"] == json.loads(json.dumps(results.judged.summary))
    assert (run / "report.html").stat().st_size > 1000 and (run / ("adapter" if mode == "prompt" else "model")).is_dir()
    assert not list(run.rglob("*.partial"))
