"""Resources, profiles and early stopping: what they report is what the machine says, and they end what they should."""

import json
import math
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from runs import MODEL, Loader, Recorder, batch, make_engine, printed

from shared.course.errors import CourseError
from shared.engine.metrics import throughput as monitoring
from shared.engine.callbacks import Callback
from shared.engine.stopping import EarlyStopping
from shared.engine.metrics.throughput import Resources
from shared.engine.metrics.profiling import Profile

# Resources, profiles, early stopping


def test_resources_are_the_operating_systems(tmp_path, monkeypatch):
    recorder, found, inner = Recorder(), [], psutil.Process.memory_info

    def memory_info(process):
        found.append(inner(process))
        return found[-1]

    monkeypatch.setattr(psutil.Process, "memory_info", memory_info)
    make_engine(tmp_path, [Resources(), recorder]).fit(Loader(), steps=2)
    metrics = recorder.logs[2]
    assert metrics["memory/resident_gib"] == found[-1].rss / 2**30 > 0.05
    assert metrics["cpu/utilisation"] > 0
    assert not [name for name in metrics if "gpu" in name]


def test_the_processors_share_is_that_of_all_cores_since_the_last_log(monkeypatch):
    """3 seconds of computing in 2 seconds keep one and a half cores busy: of 6, a quarter."""
    clock = SimpleNamespace(used=10.0, looked=100.0)
    monkeypatch.setattr(monitoring, "time", SimpleNamespace(process_time=lambda: clock.used, perf_counter=lambda: clock.looked))
    monkeypatch.setattr(monitoring.os, "cpu_count", lambda: 6)
    resources, engine, shares = Resources(), SimpleNamespace(device=torch.device("cpu")), []
    resources.on_start(engine)
    for clock.used, clock.looked in ((13.0, 102.0), (19.0, 103.0), (19.0, 108.0)):
        shares.append(resources.measure(engine)["cpu/utilisation"])
    assert shares == [0.25, 1.0, 0.0]


def test_resources_of_a_gpu_are_torchs(monkeypatch):
    answers = {"memory_allocated": 3, "memory_reserved": 5, "max_memory_allocated": 4}
    for name, gib in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, gib=gib: gib * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    resources, engine = Resources(), SimpleNamespace(device=torch.device("cuda"))
    resources.on_start(engine)
    metrics = resources.measure(engine)
    assert [metrics[f"memory/gpu_{name}_gib"] for name in ("allocated", "reserved", "peak")] == [3, 5, 4]
    assert metrics["gpu/utilisation"] == 0.87

    class NvmlError(Exception):
        """As the library's own, which is no RuntimeError."""

    for error in (ModuleNotFoundError("pynvml does not seem to be installed"), NvmlError("Not Supported")):

        def missing(device, error=error):
            raise error

        monkeypatch.setattr(torch.cuda, "utilization", missing)
        resources.on_start(engine)
        assert "gpu/utilisation" not in resources.measure(engine)


def test_a_profile_holds_the_chosen_steps_and_their_operations(tmp_path):
    engine = make_engine(tmp_path, [Profile(first_step=2, steps=2)]).fit(Loader(), steps=4)
    events = json.loads((tmp_path / "profile" / "steps-00000002-00000003.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    layers = 7 * MODEL.num_hidden_layers + 1  # queries, keys, values, output, gate, up, down; the head
    assert names.count("aten::linear") == layers * 2 * 2, "two micro-batches in each of two steps"
    _, head, rows, sums = re.split(r"^-[- ]+$", (tmp_path / "profile" / "steps-00000002-00000003.txt").read_text(), flags=re.M)
    assert "Self CPU" in head and len(rows.split("\n")) - 2 == 10 and "Self CPU time total" in sums
    shares = [float(re.search(r"([\d.]+)%", row)[1]) for row in rows.strip().split("\n")]
    assert shares == sorted(shares, reverse=True), "those that took most time themselves"
    assert "Profile of steps 2 to 3" in printed(engine)


def test_a_profile_that_cannot_be_made_is_refused_and_one_that_is_cut_short_is_ended(tmp_path):
    with pytest.raises(CourseError, match="ends with step 3"):
        make_engine(tmp_path, [Profile(first_step=3, steps=2)]).fit(Loader(), steps=3)
    with pytest.raises(CourseError, match="at least 1"):
        Profile(first_step=0)

    class Break(Callback):
        def on_step(self, engine):
            raise ZeroDivisionError

    profile = Profile(first_step=1, steps=2)
    with pytest.raises(ZeroDivisionError):
        make_engine(tmp_path, [profile, Break()]).fit(Loader(), steps=3)
    assert profile.profiler is None


def test_early_stopping_waits_for_its_patience():
    losses = [3.0, 2.5, 2.5, 2.495, 2.0, math.nan, 2.1, 2.2]
    stopped = []
    engine = SimpleNamespace(stop=stopped.append)
    stopping = EarlyStopping(patience=3, minimum_improvement=0.01)
    for index, loss in enumerate(losses):
        if index == 6:  # a resume in between, by way of JSON
            fresh = EarlyStopping(patience=3, minimum_improvement=0.01)
            fresh.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
            stopping = fresh
        stopping.on_evaluate(engine, {"validation/loss": loss})
        assert bool(stopped) == (index == 7), index
    assert stopped == ["validation/loss has not fallen below 2.0000 in 3 evaluations"]


def test_early_stopping_ends_a_run_and_refuses_what_it_cannot_watch(tmp_path):
    validation = [batch(1000, 0, 2)]
    stopping = EarlyStopping(patience=2, minimum_improvement=100.0)
    engine = make_engine(tmp_path, [stopping], evaluate_every=1).fit(Loader(), validation, steps=9)
    assert engine.step == 3 and "has not fallen" in engine.stopped
    with pytest.raises(CourseError, match="choose validation/loss"):
        stopping = EarlyStopping(1, metric="validation/accuracy")
        make_engine(tmp_path / "second", [stopping], evaluate_every=1).fit(Loader(), validation, steps=2)
    with pytest.raises(CourseError, match="at least 1"):
        EarlyStopping(patience=0)
    fresh = EarlyStopping(patience=1)
    fresh.load_state_dict(json.loads(json.dumps(fresh.state_dict())))
    assert fresh.best == math.inf
