"""The trainer on a pretended CUDA device (tests/gpu/pretended_cuda): runs end, mix no devices, train what the CPU trains, and seldom make
the host wait for the card. No GPU is needed; what only a GPU can say, `make gpu` says."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from preferring_runs import OF_MODES, ROLLING
from pretended_cuda import backend
from trainer_runs import TINY

from shared.trainer.settings import merged

pytestmark = pytest.mark.skipif(backend.reason_against() is not None, reason=str(backend.reason_against()))

SCRIPT = Path(backend.__file__).with_name("train.py")
TUNED = ["mode=sft", "adapter.rank=4", "optimizer.name=adamw", "report.held_out_rows=4", "data.held_out_rows=4"]
PAIRS = ["mode=dpo", "optimizer.name=adamw", "report.held_out_rows=4", "data.held_out_rows=4"]
TASKS = ["mode=grpo", "optimizer.name=adamw", "engine.evaluate_every=0"]
LONG = ["data.seq=2048", "model.max_position_embeddings=2048", "data.batch_size=2", "precision=bfloat16", "report.prompts=[]"]
LONG += ["report.completions=0"]
CASES = {  # words, ranks, and how often the host may wait for the card in a step that is neither logged nor saved
    "one": ([], 1, 1),
    "dp2": (["parallel.data_parallel=2", "optimizer.fused=true"], 2, 1),
    "fsdp2": (["parallel.fully_sharded=2"], 2, 1),
    "tp2": (["parallel.tensor_parallel=2"], 2, 1),
    "pp2": (["parallel.pipeline_parallel=2"], 2, 1),
    "lora": (TUNED, 1, 1),
    "lora_dp2": ([*TUNED, "parallel.data_parallel=2"], 2, 1),
    "dpo": (PAIRS, 1, 1),
    "varlen": (LONG, 1, 1),
    "grpo": (TASKS, 1, None),
    "grpo_dp2": ([*TASKS, "parallel.data_parallel=2"], 2, None),
}


LONGER = ("dpo", "varlen")  # a minute of processor time together
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in LONGER else name for name in CASES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of a case by its name, and what was printed to stderr; cases of one kind are run together."""
    run = cache(lambda names: results_of(names, tmp_path_factory.mktemp("pretended_cuda")))
    short = tuple(name for name in CASES if name not in LONGER)
    return lambda name: run(("one", *LONGER) if name in LONGER else short)


def results_of(names, folder):
    settings = merged(
        TINY,
        {
            "steps": 4,
            "data": {"prepared": str(folder / "prepared"), "seq": 128, "batch_size": 8},
            "model": OF_MODES["model"] | {"hidden_dropout": 0.0},
            "engine": {"log_every": 4, "evaluate_every": 4, "checkpoint": {"every": 2}},
        },
    )
    file, cases = folder / "tiny.yaml", []
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    of_tasks = folder / "tasks.yaml"
    del settings["data"]["held_out_rows"]
    of_tasks.write_text(yaml.safe_dump(merged(settings, {"grpo": ROLLING["grpo"]})), encoding="utf-8")
    for name in names:
        words, ranks, _ = CASES[name]
        start = [f"start_from={folder / 'one'}"] if any(word.startswith("mode=") for word in words) else []
        chosen = of_tasks if "mode=grpo" in words else file
        cases.append({"words": [str(chosen), *words, *start, f"engine.output={folder / name}"], "ranks": ranks})
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(folder / "result.json"), str(folder / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=1800)
    found = folder / "result.json"
    results = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else []
    return dict(zip(names, results, strict=False)), done.stderr[-3000:]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_a_card_ends_and_trains_what_the_cpu_trains(name, runs):
    results, error = runs(name)
    assert name in results, error
    near = 2e-3 if name == "varlen" else 1e-4  # in 16 bits
    assert results[name]["card"] == pytest.approx(results[name]["host"], rel=near, abs=1e-6)
    assert bool(results[name]["varlen"]) == (name == "varlen")
    assert results[name]["peak"] > 0


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("grpo", "grpo_dp2")])
def test_the_host_seldom_waits_for_the_card_in_a_step(name, runs):
    results, error = runs(name)
    assert name in results, error
    waits = results[name]["waits"]
    assert sum(count for count, _, _ in waits) <= CASES[name][2], waits


@pytest.mark.parametrize("name", ["grpo", "grpo_dp2"])
def test_the_host_waits_once_for_each_token_that_is_sampled(name, runs):
    results, error = runs(name)
    assert name in results, error
    found = results[name]["sampling"]
    waits = sum(count for what, count in found.items() if what.startswith("wait"))
    assert 0 < waits <= found["passes"], found
    assert found["collectives"] == 0, found  # ranks that hold whole weights need not meet
