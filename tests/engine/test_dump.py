"""A dump says what was there, and taking one changes nothing: not a bit of the results, not a hook that stays."""

import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from runs import MODEL, Loader, batch, make_engine, printed

from shared.course.errors import CourseError
from shared.engine.debug.anomalies import BrokenStep, CatchAnomalies
from shared.engine.callbacks import Callback
from shared.engine.debug.dump import Dump, ModelDump, describe, read_dump, record_activations, write_dump
from shared.engine.debug.statistics import BINS, HIGHEST, LOWEST, magnitude_histogram
from shared.loss import next_token_objective
from shared.model.transformer import TransformerModel
from shared.totals import Totals

dump_report = import_module("chapters.04_runtime_engine.dump_report")
by_layer, diff_dumps, moved_share = dump_report.by_layer, dump_report.diff_dumps, dump_report.moved_share

DROPOUT = replace(MODEL, hidden_dropout=0.2)


class Watch(Callback):
    def before_optimizer(self, engine):
        self.weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        self.gradients = {name: p.grad / engine.totals.token_count for name, p in engine.model.named_parameters()}


def hooks(model):
    return [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]


def dumps(folder):
    return sorted(path.name for path in (folder / "dumps").iterdir())


def run(folder, callbacks, steps=3, config=DROPOUT, **options):
    torch.manual_seed(0)
    return make_engine(folder, callbacks, model=TransformerModel(config), **options).fit(Loader(), steps=steps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_histogram_is_numpys_with_powers_of_two(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(701, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(-60, 25, (701,), generator=generator)
    exact = torch.tensor([0.0, -0.0, 1.0, -2.0, 2.0**-40, 2.0**16, math.nan, math.inf, -math.inf], dtype=torch.float64)
    x = torch.cat([x, exact]).to(dtype).reshape(2, -1)
    magnitudes = np.abs(x.double().numpy()).ravel()
    edges = [0.0, *(2.0**power for power in range(LOWEST, HIGHEST + 1)), 1e308]
    expected, _ = np.histogram(magnitudes[np.isfinite(magnitudes)], bins=edges)
    assert magnitude_histogram(x) == expected.tolist() and len(expected) == BINS


def test_the_share_that_moved():
    assert moved_share([4, 0, 0], [0, 4, 0]) == 1 and moved_share([2, 2], [200, 200]) == 0 and moved_share([4, 0], [3, 1]) == 0.25


def test_a_dump_holds_weights_gradients_and_activations_by_name(tmp_path):
    watch = Watch()
    engine = run(tmp_path, [watch, ModelDump(every=2, tensors=True)], steps=2, config=MODEL)
    dump = read_dump(tmp_path / "dumps" / "step-00000002")
    tensors = load_file(tmp_path / "dumps" / "step-00000002" / "tensors.safetensors")
    assert dump.step == 2 and dumps(tmp_path) == ["step-00000002"]
    for kind, expected in (("weights", watch.weights), ("gradients", watch.gradients)):
        assert list(dump.entries[kind]) == list(expected)
        for name, tensor in expected.items():
            entry, values = dump.entries[kind][name], tensor.double().numpy()
            assert torch.equal(tensors[f"{kind}.{name}"], tensor) and entry.shape == list(tensor.shape) and entry.dtype == "float32"
            assert entry.statistics["mean"] == pytest.approx(values.mean(), abs=1e-6 * np.abs(values).max())
            assert entry.statistics["rms"] == pytest.approx(math.sqrt((values**2).mean()), rel=1e-5)
            assert sum(entry.histogram) == values.size
    model = TransformerModel(MODEL)
    model.load_state_dict(watch.weights)
    first = batch(2, 0, 3)["input_ids"]
    assert torch.equal(tensors["activations.head"], model(first)), "of the first micro-batch, with the weights of the step's start"
    assert torch.equal(tensors["activations.embedding"], model.embedding(first, torch.arange(first.shape[1]), None, first.shape[1]))
    assert set(dump.entries["activations"]) == {name for name, _ in engine.model.named_modules()} - silent(model)


def test_gradients_under_a_loss_scale_are_dumped_without_it(tmp_path):
    watch = Watch()
    run(tmp_path, [watch, ModelDump(every=1, tensors=True, loss_scale=lambda: 8.0)], steps=1, config=MODEL)
    folder = tmp_path / "dumps" / "step-00000001"
    tensors, entries = load_file(folder / "tensors.safetensors"), read_dump(folder).entries
    for name, gradient in watch.gradients.items():
        assert torch.equal(tensors[f"gradients.{name}"], gradient / 8)
        assert entries["gradients"][name].statistics == describe(gradient / 8).statistics


def silent(model):
    """Modules that are never called: the model itself under its own name, and containers."""
    return {""} | {name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleDict | torch.nn.ModuleList)}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_dumping_changes_no_bit(tmp_path, autocast):
    def objective(model, one):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return next_token_objective(model, one)

    plain = run(tmp_path / "plain", [], objective=objective).model
    dumped = run(tmp_path / "dumped", [ModelDump(every=1, tensors=True)], objective=objective).model
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), dumped.parameters(), strict=True))
    assert dumps(tmp_path / "dumped") == [f"step-0000000{step}" for step in (1, 2, 3)] and not hooks(dumped)
    entries = read_dump(tmp_path / "dumped" / "dumps" / "step-00000003").entries
    assert entries["activations"]["stack.blocks.0.attention.q_proj"].dtype == ("bfloat16" if autocast else "float32")
    assert entries["weights"]["stack.blocks.0.attention.q_proj.weight"].dtype == "float32"


def test_a_dump_on_demand_is_of_the_next_step(tmp_path):
    dump = ModelDump()

    class Ask(Callback):
        def on_step(self, engine):
            assert not hooks(engine.model)
            if engine.step == 1:
                (engine.output / "dump-now").touch()
            if engine.step == 3:
                dump.dump_now()

    engine = run(tmp_path, [Ask(), dump], steps=6)
    assert dumps(tmp_path) == ["step-00000002", "step-00000004"] and not (tmp_path / "dump-now").exists()
    assert f"Dump of step 4: {tmp_path / 'dumps' / 'step-00000004'}" in printed(engine)


def test_a_broken_step_is_dumped_with_the_activations_of_the_batch_at_fault(tmp_path):
    class Overflow(torch.nn.Module):
        """Stands in for the second block's feed-forward layer; token 30 overflows in it."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * (torch.inf if self.overflowing else 1.0)

    model = TransformerModel(MODEL)
    block = model.stack.blocks["1"]
    block.feed_forward = overflow = Overflow(block.feed_forward)

    def objective(model, one):
        overflow.overflowing = bool((one["input_ids"] == 30).any())
        return next_token_objective(model, one)

    class Data(Loader):
        def __iter__(self):
            for microbatches in super().__iter__():
                for index, one in enumerate(microbatches):
                    one["input_ids"] = one["input_ids"] % 30 if (self.step, index) != (3, 1) else one["input_ids"].clamp(min=30)
                yield microbatches

    def attempt(folder, **options):
        engine = make_engine(tmp_path / folder, [CatchAnomalies(), ModelDump(**options)], model=model, objective=objective)
        with pytest.raises(BrokenStep) as raised:
            engine.fit(Data(), steps=5)
        assert raised.value.microbatch == 1 and not hooks(model)

    attempt("silent", on_anomaly=False)
    assert not (tmp_path / "silent" / "dumps").exists()
    attempt("told")
    assert dumps(tmp_path / "told") == ["step-00000003-broken"]
    entries = read_dump(tmp_path / "told" / "dumps" / "step-00000003-broken").entries
    ill = [name for name, entry in entries["activations"].items() if entry.statistics["not_finite"]]
    assert ill[0] == "stack.blocks.1.feed_forward" and "stack.blocks.0" not in ill and "head" in ill


def test_hooks_are_removed_where_the_forward_pass_raises(tmp_path):
    def objective(model, one):
        next_token_objective(model, one)
        raise ZeroDivisionError

    engine = make_engine(tmp_path, [ModelDump(every=1)], objective=objective)
    with pytest.raises(ZeroDivisionError):
        engine.fit(Loader(), steps=1)
    assert not hooks(engine.model) and not (tmp_path / "dumps").exists()


@pytest.mark.slow  # the compiler's front alone takes ten seconds to import
@pytest.mark.parametrize("part", ["", "stack.blocks.0"], ids=["the model", "a block"])
def test_a_compiled_model_is_dumped_too(tmp_path, part):
    """Hooks that come after compilation are passed by: without an uncompiled step the dump would have no activations."""
    model = TransformerModel(MODEL)
    model.get_submodule(part).compile(backend="eager")  # the compiler's front, without its back, which needs a C++ compiler
    inside = "stack.blocks.0.attention"
    make_engine(tmp_path, [ModelDump(every=2)], model=model).fit(Loader(), steps=3)
    assert inside in read_dump(tmp_path / "dumps" / "step-00000002").entries["activations"]
    with record_activations(model) as entries:
        model(batch(1, 0, 3)["input_ids"])
    assert inside not in entries, "the negative control"


def test_activations_can_be_recorded_without_an_engine():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Identity())
    kept = {}
    with record_activations(model, kept) as entries:
        out = model(torch.ones(2, 3))
        model(torch.zeros(2, 3))
    assert list(entries) == ["0", "1", "2"] and entries["1"].shape == [2, 4] and not hooks(model)
    assert torch.equal(kept["2"], out) and kept["2"].data_ptr() != out.data_ptr() and not kept["2"].requires_grad


def test_what_is_not_finite_survives_the_file(tmp_path):
    dump = Dump(7, {"weights": {"a": describe(torch.tensor([math.nan, math.inf]))}, "gradients": {}, "activations": {}})
    write_dump(tmp_path / "one", dump)
    back = read_dump(tmp_path / "one")
    assert math.isnan(back.entries["weights"]["a"].statistics["mean"]) and back.entries["weights"]["a"].statistics["not_finite"] == 1
    assert not (tmp_path / "one" / "tensors.safetensors").exists()
    with pytest.raises(CourseError, match="holds no dump"):
        read_dump(tmp_path)


def dump_of(step, **tensors):
    return Dump(step, {"weights": {name: describe(x) for name, x in tensors.items()}})


def test_the_difference_of_two_dumps_names_what_changed_most():
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    before = dump_of(1, still=x, grown=x, shrunk=x, broken=x, born=x * 0, gone=x)
    after = dump_of(2, still=x, grown=x * 8, shrunk=x / 32, broken=torch.cat([x[:250], x[250:] / 0]), born=x)
    changes = diff_dumps(before, after)
    assert [change.name for change in changes] == ["broken", "born", "shrunk", "grown", "still"]
    found = {change.name: change for change in changes}
    assert found["broken"].newly_not_finite == 0.5 and found["born"].factor == math.inf
    assert found["grown"].factor == pytest.approx(8) and found["shrunk"].factor == pytest.approx(1 / 32)
    assert found["grown"].moved > 0.5 and found["still"].moved == 0 and found["still"].factor == 1
    with pytest.raises(CourseError, match="no tensor in common"):
        diff_dumps(before, Dump(2, {"weights": {}}))


def test_a_plot_by_layer_shows_the_dumps_numbers(tmp_path):
    run(tmp_path, [ModelDump(every=1)], steps=1, config=MODEL)
    dump = read_dump(tmp_path / "dumps" / "step-00000001")
    layers = by_layer(dump, "activations")
    assert layers["attention"] == [(i, dump.entries["activations"][f"stack.blocks.{i}.attention"].statistics["rms"]) for i in (0, 1)]
    assert [layer for layer, _ in layers["block"]] == [0, 1]
    first = Figure().subplots()
    dump_report.plot_by_layer(first, dump, "activations", parts=["attention", "block"])
    assert [list(line.get_ydata()) for line in first.get_lines()] == [[y for _, y in layers[part]] for part in ("attention", "block")]
    with pytest.raises(CourseError, match="no part 'nose'"):
        dump_report.plot_by_layer(first, dump, "activations", parts=["nose"])
    with pytest.raises(CourseError, match="holds no 'biases': choose weights, gradients, activations"):
        by_layer(dump, "biases")


def test_totals_are_what_gradients_are_divided_by(tmp_path):
    """A loss sum over many tokens and the same over few must dump the same gradient of the mean."""

    def tripled(model, one):
        loss_sum, count, metrics = next_token_objective(model, one)
        return Totals(3 * loss_sum, 3 * count, metrics)

    for name, objective in (("plain", next_token_objective), ("tripled", tripled)):
        run(tmp_path / name, [ModelDump(every=1)], steps=1, config=MODEL, objective=objective)
    plain, tripled = (read_dump(tmp_path / name / "dumps" / "step-00000001").entries["gradients"] for name in ("plain", "tripled"))
    assert all(plain[name].statistics["rms"] == pytest.approx(tripled[name].statistics["rms"], rel=1e-5) for name in plain)
