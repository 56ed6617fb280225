"""Checkpoints of a run that trains an adapter, without the base: resumed bit for bit, in another layout too; and exports of the adapter and
of the merged model."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from layout_runs import largest_difference
from lora_runs import DENSE, MODELS, layout_of, make, prepared, with_biases
from mixture_runs import MixtureRun
from safetensors.torch import load_file
from sharded_runs import build

from shared.finetune.adapters import merge_adapter
from shared.finetune.base import keep_base_out, merged_weights
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_format import load_adapter, save_adapter
from shared.finetune.quantization.nf4_linear import quantize_base
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads


def run(word: str, model: str, world):
    """A run whose model is marked before it is parallelized."""

    def marked(plain, adapter):
        return keep_base_out(prepared(plain, adapter))

    return make(world, layout_of(word), model, "adamw", prepare=partial(marked, adapter=MODELS[model][1]))


def on_ranks(word: str, work) -> list:
    ranks = layout_of(word).ranks
    return run_threads(work, ranks) if ranks > 1 else [work(SingleRankCommunicator())]


@pytest.mark.parametrize(("first", "then"), [("one", "one"), ("tp2", "tp2"), ("fsdp2", "tp2"), ("tp2", "dp2_zero1"), ("pp2", "one")])
def test_a_run_is_resumed_from_the_adapter_alone(first, then, tmp_path):
    def saved(world):
        made = run(first, "dense", world).train(1)
        made.save(tmp_path)
        return made.train(2).weights()

    def resumed(world):
        made = run(then, "dense", world).restore(tmp_path)
        assert made.step == 1
        return made.train(2).weights()

    one = {name: value for each in on_ranks(first, saved) for name, value in each.items()}
    two = {name: value for each in on_ranks(then, resumed) for name, value in each.items()}
    assert largest_difference(two, one) <= (0 if first == then else 1e-9)
    held = {name.partition("[")[0] for file in tmp_path.glob("step-00000001/weights*") for name in load_file(file)}
    assert held == {name for name in one if ".adapters." in name}
    state = {name for file in tmp_path.glob("step-00000001/optimizer*") for name in load_file(file)}
    assert state and all(".adapters." in name for name in state)


@pytest.mark.parametrize("word", ["one", "tp2", "fsdp2", "pp2", "fsdp2_tp2"])
@pytest.mark.parametrize("decomposed", [False, True])
def test_adapter_and_merged_model_are_saved_from_any_layout(word, decomposed, tmp_path):
    adapter = AdapterConfig(rank=3, targets=("all-linear",) if decomposed else ("all-linear", "embedding.tokens"), decomposed=decomposed)

    def work(world):
        made = make(world, layout_of(word), "dense", "adamw", adapter=adapter).train(3)
        save_adapter(made.plain, tmp_path / "adapter", weights=made.parallel.weights())
        save_pretrained(made.plain, tmp_path / "merged", weights=merged_weights(made.plain, made.parallel.weights()))
        return made.plain

    plain = on_ranks(word, work)[0]
    ids = torch.arange(24).view(2, 12) % 29
    alone = load_adapter(with_biases(build(DENSE)), tmp_path / "adapter").eval()
    expected = alone(ids)
    merged = load_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    torch.testing.assert_close(merged(ids), expected, rtol=1e-9, atol=1e-9)
    if word == "one":
        torch.testing.assert_close(plain.eval()(ids), expected, rtol=1e-12, atol=1e-12)
    if word == "tp2":
        with torch.no_grad():
            merge_adapter(alone)
        torch.testing.assert_close(alone(ids), expected, rtol=1e-9, atol=1e-9)


QUANTIZED = replace(DENSE, hidden_size=128, intermediate_size=128, num_hidden_layers=2)


def on_four_bits(plain):
    quantize_base(plain)
    return prepared(plain, AdapterConfig(targets=("q_proj", "down_proj", "head.linear")))


@pytest.mark.parametrize("word", ["one", "tp2", "pp2"])
def test_a_merged_model_is_saved_over_a_base_in_four_bits(word, tmp_path):
    """Three merges are three models: onto the dequantized base, which is what was trained, onto the base as it was, and quantized again."""

    def work(world):
        made = MixtureRun(world, layout_of(word), "adamw", QUANTIZED, prepare=on_four_bits).train(2)
        save_adapter(made.plain, tmp_path / "adapter", weights=made.parallel.weights())
        save_pretrained(made.plain, tmp_path / "merged", weights=merged_weights(made.plain, made.parallel.weights()))

    on_ranks(word, work)
    ids = torch.arange(24).view(2, 12) % 29
    base, trained = build(QUANTIZED), with_biases(build(QUANTIZED))
    quantize_base(trained)
    expected = load_adapter(trained, tmp_path / "adapter").eval()(ids).detach()
    merged = load_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    dequantized = merged(ids).detach()
    torch.testing.assert_close(dequantized, expected, rtol=1e-5, atol=1e-5)
    quantize_base(merged)
    onto_the_base = load_adapter(with_biases(base), tmp_path / "adapter").eval()(ids).detach()
    again = merged(ids).detach()
    distances = [float((one - other).norm() / expected.norm()) for one, other in
                 ((dequantized, expected), (onto_the_base, expected), (again, expected), (onto_the_base, again))]  # fmt: skip
    assert distances[0] < 1e-6 < 1e-2 < min(distances[1:]), distances
