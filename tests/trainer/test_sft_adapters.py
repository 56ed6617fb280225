"""Adapters in the mode sft: what is trained, exported and resumed, and the same in every layout."""

import io
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import train
from tuned_runs import tuned_config, tuned_file

from shared.course.errors import SettingError
from shared.data.tokenizer import TextTokenizer
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_format import load_adapter
from shared.finetune.quantization.awq import AWQ
from shared.finetune.quantization.methods import quantize_model
from shared.finetune.quantization.nf4_files import save_nf4
from shared.finetune.quantization.nf4_linear import quantize_base
from shared.finetune.quantization.packed import QuantizedLinear
from shared.finetune.quantization.rounding import Rounding
from shared.finetune.quantization.packed_files import save_quantized
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.trainer.models import with_adapter
from shared.trainer.modes.sft import FineTuning
from shared.trainer.run import build, train_model
from shared.trainer.weights import find_initial_weights

PLAIN = (
    "model.hidden_dropout=0.0", "optimizer.name=sgd", "optimizer.lr=0.5", "schedule.warmup_steps=0", "schedule.decay_steps=0", "steps=3",
)  # fmt: skip
LAYOUTS = ("dp2_zero1", "fsdp2", "tp2", "cp2", "pp2")


@pytest.mark.parametrize("kind", ["lora", "dora", "nf4"])
def test_only_the_adapter_is_trained_and_the_export_is_base_and_update(tmp_path, base, kind):
    words = {"dora": ["adapter.decomposed=true"], "nf4": ["adapter.base=nf4", "adapter.targets=[all-linear]"]}.get(kind, [])
    config = tuned_config(tmp_path, base, "adapter.rank=4", "optimizer.name=adamw", *words)
    results = train_model(config, Console(quiet=True))
    before, after = load_pretrained(base / "model"), load_pretrained(tmp_path / "run" / "model")
    size = len(before.embedding.tokens.weight)
    moved = {
        name for name, weight in after.named_parameters() if not torch.equal(weight[:size], dict(before.named_parameters())[name])
    } - {"embedding.tokens.weight", "head.linear.weight"}  # the tied pair only grew
    assert torch.equal(after.embedding.tokens.weight[:size], before.embedding.tokens.weight)
    if kind != "nf4":
        assert moved and all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in moved)
    assert results.judged.summary["trained parameters"] < sum(parameter.numel() for parameter in after.parameters()) / 5
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


def test_peft_loads_the_adapter_and_computes_what_the_merged_model_does(tmp_path, base):
    import peft
    import transformers

    config = tuned_config(tmp_path, base, "adapter.rank=4", "optimizer.name=adamw", "optimizer.lr=0.05")
    train_model(config, Console(quiet=True))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base / "model")
    rows = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["vocab_size"]
    theirs.resize_token_embeddings(rows, mean_resizing=False)
    merged = load_pretrained(tmp_path / "run" / "model").eval()
    with torch.no_grad():
        theirs.get_input_embeddings().weight.copy_(merged.embedding.tokens.weight)
        theirs.get_output_embeddings().weight.copy_(merged.head.linear.weight)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "run" / "adapter").eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
        size = len(load_pretrained(base / "model").embedding.tokens.weight)
        assert (merged(ids)[..., :size] - load_pretrained(base / "model").eval()(ids)).abs().max() > 1e-3


def trained(config):
    def work(world):
        run = build(config, Console(quiet=True), world)
        run.engine.fit(*run.mode.loaders(run.config, run.strategy), steps=config.steps)
        return run.strategy.full_weights()

    return run_threads(work, config.parallel.ranks)[0]


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_layouts_train_what_one_process_trains(tmp_path, base, adapter):
    words = [*PLAIN, "model.hidden_dropout=0.0"] + (["adapter.rank=4", "adapter.targets=[all-linear]"] if adapter else [])
    alone = trained(tuned_config(tmp_path / "alone", base, *words))
    if adapter:
        assert all(value.abs().max() > 0 for name, value in alone.items() if name.endswith("lora_B"))
    for layout in LAYOUTS:
        parallel = parse_layout(layout)
        degrees = [f"parallel.{name}={value}" for name, value in vars(parallel).items() if value != getattr(type(parallel)(), name)]
        found = trained(tuned_config(tmp_path / layout, base, *words, *degrees))
        assert found.keys() == alone.keys(), layout
        for name, weight in alone.items():
            assert (found[name] - weight).norm() <= 2e-5 * weight.norm() + 1e-8, f"{layout}: {name}"


REPORTED = [("float", "tensor_parallel"), ("nf4", "fully_sharded"), *(("packed", f"{each}_parallel") for each in ("data", "tensor"))]


@pytest.mark.parametrize(("kept", "degree"), [*REPORTED, pytest.param("packed", "fully_sharded", marks=pytest.mark.slow)])
def test_ranks_put_the_adapted_model_together_for_the_report(tmp_path, base, monkeypatch, kept, degree):
    """The model that the report asks computes what the exported one does, over whatever base."""
    words = [*PLAIN, "adapter.rank=4", "adapter.targets=[all-linear]", f"adapter.base={kept}", f"parallel.{degree}=2"]
    if kept == "packed":
        in_codes(tmp_path, base, "nearest")
        words.append(f"start_from={tmp_path / 'codes'}")
    judge, asked = FineTuning.judge, []
    monkeypatch.setattr(FineTuning, "judge", lambda mode, run, model, totals: asked.append(model) or judge(mode, run, model, totals))
    config = tuned_config(tmp_path, base, *words)
    results = run_threads(lambda world: train_model(config, Console(quiet=True), world), 2)[0]
    assert len(results.judged.answered) == 12 and (tmp_path / "run" / "report.html").exists()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(asked[0].eval()(ids), load_pretrained(tmp_path / "run" / "model").eval()(ids), rtol=1e-4, atol=1e-4)


def test_an_interrupted_adapted_run_resumes_to_the_same_weights(tmp_path, base):
    words = ("adapter.rank=4", "adapter.dropout=0.1", "optimizer.name=adamw")
    whole = train(tuned_file(tmp_path / "whole", base), *words)
    assert whole.returncode == 0, whole.stderr
    path = tuned_file(tmp_path / "left", base, engine={"log_every": 1})
    left = train(path, *words, interrupt_after=r"step\s+3 of 6")
    assert left.returncode == 130, left.stderr
    again = train(path, *words)
    assert again.returncode == 0 and "Going on from step" in again.stdout, again.stderr
    one, other = (load_file(tmp_path / each / "run/adapter/adapter_model.safetensors") for each in ("whole", "left"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_four_bits(folder, base):
    """The base's model quantized and saved in bitsandbytes' format, with its tokenizer."""
    model = load_pretrained(base / "model")
    quantize_base(model)
    save_nf4(model, folder)
    shutil.copy(base / "model" / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize("layout", ["", "parallel.fully_sharded=2"])
def test_files_in_four_bits_are_trained_as_the_base_that_a_run_quantizes(tmp_path, base, layout):
    words = [*PLAIN, "adapter.rank=4", "adapter.base=nf4", *([layout] if layout else [])]
    four = in_four_bits(tmp_path / "four", base)
    wanted = trained(tuned_config(tmp_path / "float", base, *words))
    found = trained(tuned_config(tmp_path / "files", base, *words, f"start_from={four}"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(name.endswith("lora_B") and value.abs().max() > 0 for name, value in found.items())


def in_codes(folder, base, method):
    """The base's model rounded, or quantized by AWQ, and saved in GPTQ's or AWQ's layout, with its tokenizer; and as floats, beside it."""
    model = load_pretrained(base / "model")
    ids = torch.randint(200, (2, 64), generator=torch.Generator().manual_seed(0))
    list(quantize_model(model, [{"input_ids": ids}], AWQ(Rounding(4, 32, symmetric=False)) if method == "awq" else Rounding(8, 32)))
    save_quantized(model, folder / "codes", layout="awq" if method == "awq" else "gptq")
    for name, layer in [(name, each) for name, each in model.named_modules() if isinstance(each, QuantizedLinear)]:
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight, plain.bias = torch.nn.Parameter(layer.dequantized()), layer.bias
        model.set_submodule(name, plain)
    save_pretrained(model, folder / "floats")
    for each in ("codes", "floats"):
        shutil.copy(base / "model" / "tokenizer.json", folder / each)


@pytest.mark.parametrize(("method", "layouts"), [("nearest", ("tensor_parallel",)), ("awq", ("fully_sharded", "tensor_parallel"))])
def test_files_of_gptqs_and_awqs_layout_are_a_base_for_adapters(tmp_path, base, method, layouts):
    in_codes(tmp_path, base, method)
    words = [*PLAIN, "adapter.rank=4", "adapter.targets=[all-linear]"]
    wanted = trained(tuned_config(tmp_path / "float", base, *words, f"start_from={tmp_path / 'floats'}"))
    updates = [name for name in wanted if ".lora_" in name]
    assert updates and all(wanted[name].abs().max() > 0 for name in updates)
    for layout in (None, *layouts):
        more = ["adapter.base=packed", f"start_from={tmp_path / 'codes'}", *([f"parallel.{layout}=2"] if layout else [])]
        found = trained(tuned_config(tmp_path / str(layout), base, *words, *more))
        for name in updates:
            assert (found[name] - wanted[name]).norm() <= (2e-5 if layout else 1e-6) * wanted[name].norm() + 1e-8, (layout, name)


def test_a_run_over_codes_exports_the_merged_model_and_its_adapter(tmp_path, base):
    in_codes(tmp_path, base, "nearest")
    with subprocess.Popen(["true"]) as killed:  # in its export
        left = [tmp_path / "run" / f"{name}.{killed.pid}.partial" for name in ("adapter/adapter_config.json", "figures/loss.png")]
    kept = tmp_path / "run" / f"eval.json.{os.getpid()}.partial"  # of another command, which writes it
    for path in (*left, kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    words = ("adapter.rank=4", "optimizer.name=adamw", "optimizer.lr=0.05", "adapter.base=packed", f"start_from={tmp_path / 'codes'}")
    results = train_model(tuned_config(tmp_path, base, *words), Console(quiet=True))
    assert len(results.judged.answered) == 12
    assert list((tmp_path / "run").rglob("*.partial")) == [kept]
    merged, before = load_pretrained(tmp_path / "run" / "model").eval(), load_pretrained(tmp_path / "floats").eval()
    over_codes = load_adapter(find_initial_weights(tmp_path / "codes").load(merged.config, apart=True), tmp_path / "run" / "adapter").eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids), over_codes(ids), rtol=1e-4, atol=1e-4)
        assert (merged(ids)[..., : before.config.vocab_size] - before(ids)).abs().max() > 1e-3


def test_a_model_that_transformers_saved_in_four_bits_is_one_to_start_from(tmp_path, base):
    import transformers

    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        base / "model", device_map="cpu", dtype=torch.float32, quantization_config=how
    )
    theirs.save_pretrained(tmp_path / "four")
    ours = with_adapter(find_initial_weights(tmp_path / "four").load(), AdapterConfig(base="nf4"), seed=0).eval()
    ids = torch.arange(40)[None]
    # with gradients: without, bitsandbytes' kernel for CPUs computes in bfloat16
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["adapter.rank=4"], "start_from is a model in four bits, which stays frozen: set adapter.base to nf4"),
        (["adapter.rank=4", "adapter.base=nf4", "hqq"], "is quantized .'hqq' in its quantization_config., and training starts"),
        (["adapter.rank=4", "adapter.base=packed", "gptq"], "bits is None and group_size None in quantization_config"),
        (["adapter.rank=4", "adapter.base=packed", ""], "start_from is a model in four bits, which stays frozen: set adapter.base to nf4"),
        (["adapter.rank=4", "adapter.base=nf4", "bitsandbytes"], "is quantized .'bitsandbytes' in its quantization_config."),
    ],
)
def test_files_that_cannot_be_trained_from_are_refused_in_a_sentence(tmp_path, base, capsys, words, says):
    four, (*words, method) = in_four_bits(tmp_path / "four", base), [*words, ""] if len(words) == 1 else words
    if method:  # bitsandbytes: in 8 bits
        raw = json.loads((four / "config.json").read_text())
        (four / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": method, "load_in_8bit": True}}))
    with pytest.raises((SettingError, SystemExit)) as refusal:
        build(tuned_config(tmp_path, base, *words, f"start_from={four}"), Console(quiet=True))
    assert re.search(says, f"{refusal.value} {capsys.readouterr().err}")


@pytest.mark.parametrize(
    ("start", "words", "says"),
    [
        ("codes", [], "start_from is a model in GPTQ's or AWQ's codes, which stays frozen: set adapter.base to packed, or give the plain"),
        ("codes", ["adapter.rank=4"], "set adapter.base to packed"),
        ("codes", ["adapter.base=nf4"], "set adapter.base to packed"),
        ("floats", ["adapter.base=packed"], "adapter.base is packed, and the weights of start_from are floats: give a folder in GPTQ's"),
    ],
)
def test_codes_and_floats_are_not_taken_for_each_other(tmp_path, base, start, words, says):
    in_codes(tmp_path, base, "nearest")
    with pytest.raises(SettingError, match=says):
        build(tuned_config(tmp_path, base, *words, f"start_from={tmp_path / start}"), Console(quiet=True))


def test_a_run_says_which_layers_four_bits_leave_in_float(tmp_path, base):
    sizes = vars(load_pretrained(base / "model").config) | {"tie_word_embeddings": False, "experts": MixtureConfig(4, 48)}
    save_pretrained(TransformerModel(MixtureModelConfig(**sizes), MIXTURE, seed=0), tmp_path / "mixture")
    shutil.copy(base / "model" / "tokenizer.json", tmp_path / "mixture")
    said = io.StringIO()
    config = tuned_config(tmp_path, base, f"start_from={tmp_path / 'mixture'}", "adapter.base=nf4", "model.hidden_dropout=0.0")
    build(config, Console(file=said, width=400))
    assert "leaves the experts in float (feed_forward.experts.up_proj, feed_forward.experts.down_proj, " in said.getvalue()


def test_updates_of_experts_are_trained_on_ranks_that_share_them_and_exported(tmp_path, base):
    sizes = vars(load_pretrained(base / "model").config) | {"tie_word_embeddings": False, "experts": MixtureConfig(4, 48)}
    save_pretrained(TransformerModel(MixtureModelConfig(**sizes), MIXTURE, seed=0), tmp_path / "mixture")
    shutil.copy(base / "model" / "tokenizer.json", tmp_path / "mixture")
    words = (*PLAIN, f"start_from={tmp_path / 'mixture'}", "adapter.rank=4", "adapter.targets=[q_proj,experts.*_proj]")
    alone = trained(tuned_config(tmp_path / "alone", base, *words))
    updates = [name for name in alone if ".lora_B" in name and ".experts." in name]
    assert len(updates) == 3 * sizes["num_hidden_layers"] and all(alone[name].norm() > 0 for name in updates)
    found = train_model(tuned_config(tmp_path, base, *words), Console(quiet=True))
    assert found.judged and (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    of_experts = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert sum("mlp.experts" in name for name in of_experts) == 4 * sizes["num_hidden_layers"]
    spread = trained(tuned_config(tmp_path / "ep2", base, *words, "parallel.data_parallel=2", "parallel.expert_parallel=2"))
    for name, weight in alone.items():
        assert (spread[name] - weight).norm() <= 2e-5 * weight.norm() + 1e-8, name
    with pytest.raises(SettingError, match=r"adapter.targets: adapter.dropout is 0.1, and peft has none over experts: give 0"):
        build(tuned_config(tmp_path / "dropped", base, *words, "adapter.dropout=0.1"), Console(quiet=True))


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_are_trained_and_exported_alone(tmp_path, base, kind):
    config = tuned_config(tmp_path, base, f"adapter.kind={kind}", "adapter.virtual_tokens=5", "optimizer.name=adamw", "optimizer.lr=0.1")
    results = train_model(config, Console(quiet=True))
    assert not (tmp_path / "run" / "model").exists() and (tmp_path / "run" / "adapter" / "adapter_config.json").exists()
    assert results.judged.summary["trained parameters"] == (5 * 64 if kind == "prompt" else 5 * 2 * 2 * 32)


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_tokens_that_were_added_stay_apart_under_a_frozen_embedding(tmp_path, base, kind):
    """Equal frozen rows would give a chat's begin and end tokens one logit for good, and the first of the two is the greedy choice."""
    runs = [build(tuned_config(tmp_path / each, base, *words), Console(quiet=True)) for each, words in
            {"adapted": [f"adapter.kind={kind}", "optimizer.name=adamw"], "full": []}.items()]  # fmt: skip
    (apart, full), size = [run.engine.model.embedding.tokens.weight.detach() for run in runs], runs[0].start.model.vocab_size
    assert len(apart) == len(full) == size + 2 and torch.equal(apart[:size], full[:size])
    assert torch.equal(full[-1], full[-2]) and torch.equal(full[-1], full[:size].double().mean(0).float())
    assert (apart[-1] - apart[-2]).norm() > full[:size].std(0).norm() / 2


@pytest.mark.parametrize("target", ["embedding.tokens", "head.linear"])
def test_an_adapter_that_could_not_be_exported_is_refused_before_the_first_step(tmp_path, base, target):
    tied = replace(load_pretrained(base / "model").config, tie_word_embeddings=True)
    save_pretrained(TransformerModel(tied), tmp_path / "start")
    TextTokenizer.load(base / "model").save_pretrained(tmp_path / "start", 128)
    config = tuned_config(tmp_path, tmp_path / "start", "optimizer.name=adamw", f"adapter.targets=[q_proj,{target}]")
    with pytest.raises(SettingError, match=f"The update of {target} cannot be merged"):
        build(config, Console(quiet=True))
    build(replace(config, report=replace(config.report, export=False)), Console(quiet=True))
