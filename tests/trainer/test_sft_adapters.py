"""Adapters in the mode sft: what is trained, exported and resumed, and the same in every layout."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import train
from tuned_runs import PLAIN, in_codes, trained, tuned_config, tuned_file

from shared.course.errors import SettingError
from shared.data.tokenizer import TextTokenizer
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.trainer.modes.sft import FineTuning
from shared.trainer.run import build, train_model

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
