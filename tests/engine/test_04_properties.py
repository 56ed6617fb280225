"""Property tests of chapter 04's contracts: sentences of the docstrings, held against the solutions on inputs that hypothesis invents."""

import copy
import importlib
import math
import struct
import tempfile
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared.engine.checkpoint.snapshot import take_snapshot, weights_of
from shared.model.config import ModelConfig

SOLUTION = importlib.import_module("solutions.04_runtime_engine")
FEW = settings(max_examples=60)
NUMBERS = st.floats(-1e6, 1e6, width=32)
ANY = NUMBERS | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])


@FEW
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(-2, 40), st.booleans(), st.booleans())
def test_flops_are_linear_in_what_they_count(layers, queries, keys, head_dim, seq, gated, tied):
    sizes = {"vocab_size": 7, "hidden_size": 6, "num_attention_heads": queries * keys, "num_key_value_heads": keys}
    sizes |= {"head_dim": 2 * head_dim}
    count = lambda layers, seq: SOLUTION.flops_per_token(  # noqa: E731
        ModelConfig(**sizes, num_hidden_layers=layers, gated=gated, tie_word_embeddings=tied), seq
    )
    if seq < 1:
        with pytest.raises(ValueError):
            count(layers, seq)
        return
    assert type(count(layers, seq)) is int
    assert count(layers, seq) - count(layers, 1) == 12 * layers * queries * keys * 2 * head_dim * (seq - 1)
    one = count(2, seq) - count(1, seq)
    assert count(layers, seq) == count(1, seq) + (layers - 1) * one
    assert count(1, seq) - one == 6 * 6 * 7  # the head, tied or not


@FEW
@given(st.lists(st.lists(NUMBERS, max_size=6) | st.none(), max_size=6), st.sampled_from(["float32", "float64"]))
def test_the_norm_is_that_of_all_elements_however_they_are_cut(rows, dtype):
    gradients = [None if row is None else torch.tensor(row, dtype=getattr(torch, dtype)) for row in rows]
    before = copy.deepcopy(gradients)
    norm = SOLUTION.global_gradient_norm(each for each in gradients)
    exact = math.sqrt(sum(Fraction(x) ** 2 for row in rows if row for x in row))
    assert norm.shape == () and norm.item() == pytest.approx(exact, rel=1e-5 if dtype == "float32" else 1e-12, abs=1e-30)
    assert norm.dtype == (torch.float64 if dtype == "float64" and any(row is not None for row in rows) else torch.float32)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(gradients, before))


@FEW
@given(st.lists(st.lists(ANY, min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_norm_is_finite_exactly_where_all_gradients_are(rows):
    norm = SOLUTION.global_gradient_norm([torch.tensor(row) for row in rows])
    assert math.isfinite(norm.item()) == all(math.isfinite(x) for row in rows for x in row)


@FEW
@given(st.lists(ANY, min_size=1, max_size=30))
def test_statistics_are_those_of_the_finite_elements(values):
    found = SOLUTION.activation_statistics(torch.tensor(values, dtype=torch.float64))
    finite = [Fraction(x) for x in values if math.isfinite(x)]
    assert found["zeros"] * len(values) == pytest.approx(values.count(0.0))
    assert found["not_finite"] * len(values) == pytest.approx(len(values) - len(finite))
    if not finite:
        assert all(math.isnan(found[name]) for name in ("mean", "std", "rms", "abs_max"))
        return
    mean, largest = sum(finite) / len(finite), max(map(abs, finite))
    near = {"rel": 1e-9, "abs": 1e-9 * float(largest) + 1e-30}
    assert found["abs_max"] == largest
    assert found["mean"] == pytest.approx(float(mean), **near)
    assert found["std"] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite)), **near)
    assert found["rms"] == pytest.approx(math.sqrt(sum(x * x for x in finite) / len(finite)), **near)


FILES = st.dictionaries(st.sampled_from(["weights", ".mark", "a/b", "a/c/d", "e.partial", "f/empty"]), st.binary(max_size=9), max_size=5)


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@FEW
@given(FILES, st.none() | FILES, st.none() | FILES, st.none() | st.sampled_from([OSError, KeyboardInterrupt]))
def test_a_save_is_whole_or_leaves_no_trace(new, old, leftover, error):
    with tempfile.TemporaryDirectory() as place:
        target, partial = Path(place) / "step-1.5", Path(place) / "step-1.5.partial"
        for folder, files in ((target, old), (partial, leftover)):
            if files is not None:
                folder.mkdir()
                put(folder, files)

        def write(folder: Path) -> None:
            assert folder == partial and list(folder.iterdir()) == []
            assert target.exists() == (old is not None) and (old is None or files_in(target) == old)
            put(folder, new)
            if error is not None:
                raise error

        if error is None:
            SOLUTION.atomic_save(target, write)
        else:
            with pytest.raises(error):
                SOLUTION.atomic_save(target, write)
        expected = new if error is None else old
        assert [path.name for path in Path(place).iterdir()] == ([] if expected is None else ["step-1.5"])
        assert expected is None or files_in(target) == expected


class Weights(nn.Module):
    def __init__(self, rows: dict[str, list[float]]):
        super().__init__()
        for name, row in rows.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(row)))
        self.register_buffer("centre", torch.zeros(2))


class Counter:
    def __init__(self, count: int):
        self.state = {"seen": {"count": count}}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        torch.rand(()), state["seen"].update(loaded=True)  # it draws, and writes into what it is given
        self.state = state


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: struct.pack(f"{tensor.numel()}f", *tensor.flatten().tolist()) for name, tensor in tensors.items()}


def run_of(rows: dict[str, list[float]], count: int):
    model = Weights(rows)
    return model, torch.optim.SGD(model.parameters(), lr=count / 10, momentum=0.9), {"loader": Counter(count)}


NAMES = st.sampled_from(["first", "second", "third"])
ROWS = st.dictionaries(NAMES, st.lists(ANY, min_size=1, max_size=3), min_size=1)


@FEW
@given(ROWS, st.integers(0, 99), ROWS, st.randoms())
def test_a_restored_run_has_the_saved_bits_or_is_refused_unchanged(rows, step, others, shuffled):
    model, optimizer, parts = run_of(rows, 7)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    snapshot = copy.deepcopy(take_snapshot(step, model, optimizer, parts))
    drawn = torch.rand(3)
    names = shuffled.sample(sorted(others), len(others))
    other, of_other, their_parts = run_of({name: others[name] for name in names}, 3)
    before, memory = bits(weights_of(other)), {name: weight.data_ptr() for name, weight in weights_of(other).items()}
    fits = {name: len(row) for name, row in rows.items()} == {name: len(row) for name, row in others.items()}
    if not fits:
        with pytest.raises(ValueError):
            SOLUTION.restore(snapshot, other, of_other, their_parts)
        assert bits(weights_of(other)) == before and not of_other.state and their_parts["loader"].state == {"seen": {"count": 3}}
        return
    saved = bits(snapshot.weights)
    assert SOLUTION.restore(snapshot, other, of_other, their_parts) == step
    assert torch.equal(torch.rand(3), drawn)
    assert bits(weights_of(other)) == saved == bits(snapshot.weights)
    assert {name: weight.data_ptr() for name, weight in weights_of(other).items()} == memory
    assert of_other.param_groups[0]["lr"] == 0.7 and their_parts["loader"].state["seen"]["count"] == 7
    assert snapshot.parts == {"loader": {"seen": {"count": 7}}}
