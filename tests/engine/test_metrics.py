"""What the monitoring callbacks report is what happened, and watching changes nothing."""

from types import SimpleNamespace

import math
import pytest
import torch
from runs import MODEL, SEQ, Loader, Recorder, batch, make_engine, printed

from shared.course.errors import CourseError
from shared.engine.metrics import flops, throughput as monitoring
from shared.engine.callbacks import Callback
from shared.engine.metrics.flops import PEAKS, flops_per_token, measure_peak, mfu, peak_flops, peak_of
from shared.engine.metrics.throughput import Resources, Throughput, tokens_of
from shared.engine.metrics.gradient_norm import Norms
from shared.engine.strategy import Strategy
from shared.engine.metrics.profiling import Profile
from shared.model.config import ModelConfig
from shared.model.roles import parameters_by_role
from shared.model.transformer import TransformerModel

# Peaks and utilisation


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA GeForce RTX 3090", torch.bfloat16, 71e12),
        ("NVIDIA GeForce RTX 4090", torch.float16, 165.2e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("A100-PCIE-40GB", torch.float32, 19.5e12),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H200", torch.bfloat16, 989.4e12),
    ],
)
def test_a_gpus_peak_is_looked_up_by_the_drivers_name(name, dtype, expected):
    assert peak_of(name, dtype) == expected


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 NVL",
        "Tesla T4",
    ],
)
def test_a_gpu_that_only_resembles_one_in_the_table_is_refused(name):
    with pytest.raises(CourseError, match=f"(?s){name}.*give peak_flops"):
        peak_of(name, torch.bfloat16)


def test_no_peak_is_that_of_sparse_products_or_of_another_dtype():
    for peak in PEAKS.values():
        assert peak.float32 <= peak.tf32 <= peak.half < 1000e12
    with pytest.raises(CourseError, match="float64"):
        peak_of("NVIDIA H200", torch.float64)
    assert peak_of("NVIDIA H200", torch.float32, tf32=True) == 494.7e12
    with pytest.raises(CourseError, match="type mps"):
        peak_flops("mps", torch.float32)


def test_a_cpus_peak_is_measured_in_products_that_happen(monkeypatch):
    """A clock that says how many operations were done, as a processor of 1 FLOP a tick would."""
    done = {"flops": 0.0}
    real = torch.mm

    def counted(left, right, *, out):
        done["flops"] += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return real(left, right, out=out)

    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=lambda: done["flops"]))
    monkeypatch.setattr(torch, "mm", counted)
    assert measure_peak(torch.float32, size=64, repeats=3, at_most=math.inf) == 1.0
    assert done["flops"] == (1 + 3) * 2 * 64**3
    measure_peak(torch.float32, size=64, repeats=3, at_least=10 * 2 * 64**3, at_most=math.inf)
    assert done["flops"] == (1 + 3 + 1 + 10) * 2 * 64**3, "for as long as was asked"
    monkeypatch.undo()
    assert peak_flops("cpu", torch.float32) > 1e8  # slower than any processor that runs this


@pytest.mark.parametrize("speed", [1e12, 1e10, 1e9, 2e8])
def test_measuring_a_cpus_peak_ends_in_time_on_a_slow_one_too(monkeypatch, speed):
    """A clock that counts operations as a processor of this many FLOP/s would: at 1e9, one product of 1024 x 1024 takes 2 seconds."""
    clock = {"seconds": 0.0}

    def slow(left, right, *, out):
        clock["seconds"] += 2 * left.shape[0] * left.shape[1] * right.shape[1] / speed

    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=lambda: clock["seconds"]))
    monkeypatch.setattr(torch, "mm", slow)
    assert measure_peak(torch.bfloat16) == pytest.approx(speed)
    assert clock["seconds"] < 1.0, "so that precision auto, which measures two dtypes, takes less than 2 seconds"


def test_utilisation_of_a_published_run():
    """PaLM 540B (Chowdhery et al. 2022, table 3, appendix B): 238.3e3 tokens/s on 6144 TPU v4 of 275e12 FLOP/s are 46.2 %."""
    per_token = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    assert mfu(per_token, 238.3e3, 6144 * 275e12) == pytest.approx(0.462, abs=0.001)


# Throughput


class Clock:
    """Stands for the module time: a second passes only when it is told."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


def stepped(throughput, clock, engine, *, compute, data=0.25, update=0.5, between=0.125):
    """One step: `data` seconds before the batch is there, then `compute`, callbacks of `between`, `update`."""
    throughput.on_batch(engine, engine.microbatches)
    clock.now += compute + between + update
    engine.timings = {"data": data, "compute": compute, "update": update}
    throughput.on_step(engine)
    clock.now += 100.0  # an evaluation, which must not count


def test_throughput_counts_read_tokens_and_the_seconds_of_steps(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(monitoring, "time", clock)
    engine = SimpleNamespace(strategy=Strategy(TransformerModel(MODEL)), microbatches=[batch(1, 0, 3), batch(1, 1, 2)])
    throughput = Throughput(peak_flops=1e12)
    throughput.on_start(engine)
    stepped(throughput, clock, engine, compute=1.0)
    stepped(throughput, clock, engine, compute=3.0)
    metrics = throughput.measure(engine)
    seconds = 2 * (0.25 + 0.125 + 0.5) + 1.0 + 3.0
    assert metrics["progress/tokens"] == 2 * 5 * SEQ and metrics["progress/samples"] == 10
    assert metrics["speed/tokens_per_second"] == 2 * 5 * SEQ / seconds
    assert metrics["speed/samples_per_second"] == 10 / seconds
    assert metrics["speed/step_seconds"] == seconds / 2
    shares = {name.removeprefix("speed/share."): value for name, value in metrics.items() if name.startswith("speed/share")}
    assert shares == pytest.approx({"data": 0.25 / 3.875, "compute": 3 / 3.875, "update": 0.5 / 3.875, "other": 0.125 / 3.875})
    assert metrics["speed/mfu"] == pytest.approx(flops_per_token(MODEL, SEQ) * 2 * 5 * SEQ / seconds / 1e12)
    stepped(throughput, clock, engine, compute=7.0)
    assert throughput.measure(engine)["speed/step_seconds"] == 7.875, "the window begins anew at each log"
    assert set(throughput.measure(engine)) == {"progress/tokens", "progress/samples"}, "without a step there is no speed"


def test_throughput_counts_replicas_and_both_sides_of_an_encoder_decoder():
    ids = torch.zeros(2, 7, dtype=torch.int64)
    assert tokens_of({"input_ids": ids, "decoder_input_ids": ids[:, :3], "targets": ids[:, :3]}) == 14 + 6
    engine = SimpleNamespace(microbatches=[batch(1, 0, 3)], timings={}, strategy=SimpleNamespace(data_size=4, size=8))
    throughput = Throughput(peak_flops=1e18, config=MODEL)
    throughput.on_batch(engine, engine.microbatches)
    throughput.on_step(engine)
    assert (throughput.tokens, throughput.samples) == (4 * 3 * SEQ, 12)
    metrics = throughput.measure(engine)
    assert metrics["speed/mfu"] == pytest.approx(flops_per_token(MODEL, SEQ) * metrics["speed/tokens_per_second"] / 8e18)
    assert metrics["speed/samples_per_second"] * SEQ == pytest.approx(metrics["speed/tokens_per_second"])


def test_a_peak_that_steps_beat_grows_and_says_so_once(tmp_path):
    """The peak of a CPU is measured, and another program may have used the CPU just then: utilisation would be above 100 %."""
    recorder = Recorder()
    engine = make_engine(tmp_path, [Throughput(peak_flops=1e3), recorder]).fit(Loader(), steps=8)
    assert len(recorder.logs) == 5 and all(0 < log["speed/mfu"] <= 1 for log in recorder.logs.values())
    assert printed(engine).count("of the peak of 1e+03 FLOP/s, so the peak is too low and grows") == 1
    peaks = [log["speed/peak_flops"] for log in recorder.logs.values()]
    assert peaks == sorted(peaks) and peaks[0] > 1e3
    calm = Recorder()
    engine = make_engine(tmp_path / "calm", [Throughput(peak_flops=1e15), calm]).fit(Loader(), steps=2)
    assert "grows" not in printed(engine) and "speed/peak_flops" not in calm.logs[2]


def test_utilisation_without_a_countable_model_is_refused_at_the_start(tmp_path):
    with pytest.raises(CourseError, match="leave peak_flops out"):
        Throughput(peak_flops=1e12).on_start(SimpleNamespace(strategy=Strategy(torch.nn.Linear(2, 2))))
    with pytest.raises(ValueError, match="encoder-decoder"):
        Throughput(1e12, ModelConfig(architecture="encoder-decoder", position="relative")).on_start(SimpleNamespace())


def test_a_resumed_run_counts_on(tmp_path):
    for steps in (4, 6):
        recorder = Recorder()
        make_engine(tmp_path, [Throughput(), recorder]).fit(Loader(), steps=steps)
    assert {step: log["progress/tokens"] for step, log in recorder.logs.items()} == {6: 6 * 5 * SEQ}


# Norms


class Watch(Callback):
    """The oracle: copies of gradients and weights, from which plain torch computes."""

    def before_optimizer(self, engine):
        self.gradients = {name: p.grad / engine.totals.token_count for name, p in engine.model.named_parameters() if p.grad is not None}
        self.old = {name: p.detach().clone() for name, p in engine.model.named_parameters()}

    def on_step(self, engine):
        self.changes = {name: p.detach() - self.old[name] for name, p in engine.model.named_parameters()}


def length(tensors):
    return torch.nn.utils.get_total_norm(list(tensors)).item()


def test_norm_metrics_equal_torch_for_the_model_and_each_role(tmp_path):
    watch, recorder, norms = Watch(), Recorder(), Norms()
    engine = make_engine(tmp_path, [watch, norms, recorder]).fit(Loader(), steps=2)
    metrics = {name: value for name, value in recorder.logs[2].items() if name.startswith("norm/")}
    assert norms.measure(engine) == {}, "a step's norms are logged once"
    roles = {role: set(named) for role, named in parameters_by_role(engine.model).items() if named}
    expected = {}
    for suffix, names in ({"": set(watch.old)} | {f".{role}": names for role, names in roles.items()}).items():
        gradient, weight, change = (length(kept[name] for name in names) for kept in (watch.gradients, watch.old, watch.changes))
        expected |= {f"norm/gradient{suffix}": gradient, f"norm/weight{suffix}": weight, f"norm/update_ratio{suffix}": change / weight}
    assert metrics == pytest.approx(expected, rel=1e-5)  # sums of some thousand squares in float32
    assert set(roles) == {"embedding", "matrix", "norm"}


def test_norms_leave_out_what_is_frozen_zero_or_not_asked_for(tmp_path):
    model = TransformerModel(MODEL)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(False)
        if name.startswith("embedding"):
            parameter.data.zero_()
    recorder = Recorder()
    make_engine(tmp_path, [Norms(), recorder], model=model).fit(Loader(), steps=1)
    assert "norm/gradient.norm" not in recorder.logs[1] and recorder.logs[1]["norm/weight.norm"] > 0
    recorder = Recorder()
    make_engine(tmp_path / "second", [Norms(updates=False, loss_scale=lambda: 8.0), recorder]).fit(Loader(), steps=1)
    plain = Recorder()
    make_engine(tmp_path / "third", [Norms(), plain]).fit(Loader(), steps=1)
    assert not [name for name in recorder.logs[1] if "update" in name]
    assert recorder.logs[1]["norm/gradient"] == pytest.approx(plain.logs[1]["norm/gradient"] / 8)


def test_norms_touch_nothing_in_steps_that_are_not_logged(tmp_path):
    counted = []

    class Counting(Strategy):
        def norms(self, groups):
            counted.append((engine.step, "all" in groups))
            return super().norms(groups)

    engine = make_engine(tmp_path, [Norms()], log_every=3, evaluate_every=0, strategy=Counting)
    engine.fit(Loader(), steps=7)
    by_role = {step for step, is_whole in counted if not is_whole}
    assert by_role == {0, 1} | {2, 3} | {5, 6} | {6, 7}  # steps 1, 3, 6 and 7 are logged, before the update and after it
    assert [step for step, is_whole in counted if is_whole] == list(range(7))  # the whole gradient's norm: once a step


def test_metrics_callbacks_change_no_weight(tmp_path):
    plain = make_engine(tmp_path / "plain", []).fit(Loader(), steps=4).model
    watched = make_engine(tmp_path / "watched", [Throughput(), Norms(), Resources(), Profile(2, 1)]).fit(Loader(), steps=4).model
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
