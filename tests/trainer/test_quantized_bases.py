"""A frozen base in four bits, or in GPTQ's or AWQ's codes, under an adapter: trained, exported, and refused where it cannot be."""

import io
import json
import os
import re
import shutil
import subprocess

import pytest
import torch
from rich.console import Console
from tuned_runs import PLAIN, in_codes, in_four_bits, trained, tuned_config

from shared.course.errors import SettingError
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_format import load_adapter
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.trainer.models import with_adapter
from shared.trainer.run import build, train_model
from shared.trainer.weights import find_initial_weights


@pytest.mark.parametrize("layout", ["", "parallel.fully_sharded=2"])
def test_files_in_four_bits_are_trained_as_the_base_that_a_run_quantizes(tmp_path, base, layout):
    words = [*PLAIN, "adapter.rank=4", "adapter.base=nf4", *([layout] if layout else [])]
    four = in_four_bits(tmp_path / "four", base)
    wanted = trained(tuned_config(tmp_path / "float", base, *words))
    found = trained(tuned_config(tmp_path / "files", base, *words, f"start_from={four}"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(name.endswith("lora_B") and value.abs().max() > 0 for name, value in found.items())


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
