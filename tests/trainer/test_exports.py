"""What a run leaves for other libraries: weights in the dtype that is asked for, an adapter with peft's names, a model card of the hub."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM
from tuned_runs import tuned_config

from shared.course.errors import CourseError
from shared.finetune.gguf.unpack import SOURCE
from shared.model.hf.pretrained import Weights
from shared.parallel.comm.threads import run_threads
from shared.trainer.card import name_of, write_card
from shared.trainer.config import TrainerConfig
from shared.trainer.export import export, in_dtype, require_range
from shared.trainer.run import build, train_model
from shared.trainer.talk.opened import opened

QUIET, IDS = Console(quiet=True), torch.arange(1, 17)[None]


def test_a_run_is_exported_in_the_dtype_that_is_asked_for(tmp_path, base):
    """And its adapter names the layers as peft's users do. transformers and peft read both, to the same logits but for rounding."""
    words = ["steps=1", "schedule.decay_steps=0", "optimizer.name=adamw", "optimizer.lr=0.01", "report.dtype=bfloat16"]
    config = tuned_config(tmp_path, base, *words, "adapter.rank=4", "adapter.targets=[q_proj, v_proj]")
    train_model(config, QUIET)
    with torch.no_grad():
        require_readable(config.engine.output, base)
    card = ModelCard.load(config.engine.output / "adapter/README.md")
    assert (card.data.library_name, card.data.license, card.data.base_model) == ("peft", None, None)
    assert "No licence is given" in card.text and "generated examples: 1 steps, with lora of rank 4" in card.text
    assert str(tmp_path) not in card.content and str(base) not in card.content


def require_readable(output: Path, base: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(output / "model", dtype="auto").eval()
    assert theirs.dtype == torch.bfloat16 and json.loads((output / "model/config.json").read_text())["dtype"] == "bfloat16"
    told = json.loads((output / "adapter/adapter_config.json").read_text())
    assert told["target_modules"] == ["q_proj", "v_proj"]
    plain = AutoModelForCausalLM.from_pretrained(base / "model").eval()
    before = plain(IDS).logits
    adapted = PeftModel.from_pretrained(plain, output / "adapter").eval()(IDS).logits  # without the rows of the template's two tokens
    assert (adapted - before).norm() > 0.01 * before.norm()
    assert (adapted - theirs.float()(IDS).logits[..., : adapted.shape[-1]]).norm() < 0.02 * adapted.norm()
    torch.testing.assert_close(opened(output)[0].eval()(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_value_that_the_dtype_cannot_hold_is_refused_and_one_that_it_can_is_rounded(tmp_path):
    values = {"small": torch.tensor([1 / 3, 65_504.0]), "large": torch.tensor([70_000.0]), "count": torch.tensor([3])}
    half, too_large = in_dtype(Weights(values, values.get), "float16")
    assert torch.equal(half.collect("small"), values["small"].half()) and half.collect("count").dtype == torch.int64
    assert {name: like.dtype for name, like in half.like.items()} == {
        "small": torch.float16, "large": torch.float16, "count": torch.int64}  # fmt: skip
    require_range("float16", too_large, tmp_path)
    half.collect("large")  # ranks collect together: nothing is raised before all have
    with pytest.raises(CourseError, match="report.dtype is float16, and large has values that are too large"):
        require_range("float16", too_large, tmp_path)
    assert not tmp_path.exists()
    wide, too_large = in_dtype(Weights(values, values.get), "bfloat16")
    assert wide.collect("large").isfinite().all() and not too_large


def test_every_rank_ends_with_a_value_that_the_dtype_cannot_hold(tmp_path, base):
    config = tuned_config(tmp_path, base, "steps=1", "schedule.warmup_steps=0", "schedule.decay_steps=0", "report.dtype=float16",
        "parallel.data_parallel=2", "adapter=null")  # fmt: skip

    def work(world):
        run = build(config, Console(quiet=True), world)
        with torch.no_grad():
            next(run.strategy.module.parameters()).view(-1)[0] = 1e6
        with pytest.raises(CourseError, match="report.dtype is float16, and embedding.tokens.weight has values"):
            export(run)
        return True

    assert run_threads(work, 2) == [True, True] and not (config.engine.output / "model").exists()


def folder_of(tmp_path: Path, name: str, **files: dict | str) -> Path:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file.replace("_", ".", 1)).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_known_base_is_named_as_the_hub_names_it_and_another_by_its_path(tmp_path):
    """A fine-tuned model's config.json names its own base, whose weights an adapter over it must not be put on."""
    packaged = folder_of(tmp_path, "packaged")
    (packaged / SOURCE).write_text(json.dumps({"file": "/anywhere/SmolLM2-135M-Instruct.Q4_1.gguf"}))
    cached = folder_of(tmp_path, "hub/models--an-org--a.model/snapshots/0123")
    tuned = folder_of(tmp_path, "tuned", config_json={"_name_or_path": "an-org/its-base"})
    assert [name_of(each) for each in (packaged, cached, tuned)] == ["HuggingFaceTB/SmolLM2-135M-Instruct", "an-org/a.model", str(tuned)]


def test_a_card_is_one_that_the_hub_reads_and_one_of_the_users_own_stays(tmp_path):
    base = folder_of(tmp_path, "hub/models--an-org--a.model/snapshots/0123", README_md="---\nlicense: mit\n---\n# base\n")
    output = folder_of(tmp_path, "run")
    config = TrainerConfig(steps=1200)
    config.engine.output = output
    write_card(output, config, base, "transformers")
    card = ModelCard.load(output / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers", "tags": ["train-language-models", "pretrain"], "pipeline_tag": "text-generation",
        "base_model": "an-org/a.model", "base_model_relation": "finetune", "license": "mit",
    }  # fmt: skip
    assert "Trained from an-org/a.model by pretraining on embedded: 1,200 steps." in card.text and "licence is mit" in card.text
    write_card(output, config, None, "transformers")
    assert "from random weights" in (output / "README.md").read_text() and "mit" not in (output / "README.md").read_text()
    (output / "README.md").write_text("# Mine\n")
    write_card(output, config, base, "transformers")
    assert (output / "README.md").read_text() == "# Mine\n"
