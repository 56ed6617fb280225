"""quantize.py and quantization_table.py as a reader starts them: what they write, what they print, and what they refuse."""

import json
import math
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console
from scripts import run_script

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.data.tokenizer import TextTokenizer
from shared.finetune.quantization.methods import require_sizes
from shared.finetune.quantization.packed_files import load_quantized, quantized_layers
from shared.finetune.quantization.rounding import Rounding
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.rl.generation import Drawing
from shared.trainer.talk.chat import AnswerSettings, open_talk
from shared.trainer.weights import find_initial_weights

CHAPTER = CHECKOUT / "chapters" / "10_finetuning"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """What a run leaves: a model's folder with its tokenizer; and a folder of text."""
    folder, text = tmp_path_factory.mktemp("run") / "model", tmp_path_factory.mktemp("text")
    for number in range(40):
        (text / f"{number}.py").write_text(f"def double_{number}(x):\n    return x + x  # twice {number}\n" * 20)
    tokenizer = TextTokenizer.train([file.read_text() for file in sorted(text.iterdir())], 300, sentinels=0)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                         max_position_embeddings=64, initializer_range=0.1)  # fmt: skip
    save_pretrained(TransformerModel(config, seed=0), folder, token_ids={"eos_token_id": tokenizer.end_id})
    tokenizer.save_pretrained(folder, 64)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    return folder, text


def quantize(exported, output, *words):
    folder, text = exported
    sizes = ("--rows", 8, "--seq", 32, "--held_out_rows", 8, "--group", 32)
    return run_script(CHAPTER / "quantize.py", "--model", folder, "--data", text, "--output", output, *sizes, *words, cwd=output.parent)


def test_a_runs_model_is_quantized_and_told_about(exported, tmp_path):
    with subprocess.Popen(["true"]) as killed:  # while it wrote
        (tmp_path / "out" / "model").mkdir(parents=True)
        (tmp_path / "out" / "model" / f"model.safetensors.{killed.pid}.partial").touch()
    done = quantize(exported, tmp_path / "out", "--method", "gptq")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "out").rglob("*.partial"))
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("Block ")] == ["Block 1 of 2", "Block 2 of 2"]
    assert lines[0].startswith("Calibration text: 8 rows of 32 tokens of ")
    assert "stack.blocks.0.feed_forward.down_proj" in done.stdout and "Perplexity of a token" in done.stdout
    before = load_pretrained(exported[0])
    after = load_quantized(tmp_path / "out" / "model")
    ids = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        changed = (before(ids) - after(ids)).norm() / before(ids).norm()
    assert 0 < changed < 0.5
    assert TextTokenizer.load(tmp_path / "out" / "model").identity == TextTokenizer.load(exported[0]).identity
    told = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert told["quantization_config"]["quant_method"] == "gptq" and told["eos_token_id"] is not None
    with pytest.raises(ValueError, match="quantiz.*load_quantized"):
        load_pretrained(tmp_path / "out" / "model")
    assert find_initial_weights(tmp_path / "out").folder == tmp_path / "out" / "model"
    talk = open_talk(tmp_path / "out", AnswerSettings(Drawing(temperature=0.0), new_tokens=4), None)
    assert talk.template and "".join(talk.answer("def double_3")) and all(layer.kernel for layer in quantized_layers(talk.model))
    file = tmp_path / "out" / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CourseError, match="no complete safetensors file"):
        open_talk(tmp_path / "out", talk.settings, None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 5}, "bits is 5: give one of 2, 3, 4, 8"),
        ({"group": 48}, "stack.blocks.0.attention.q_proj: A layer of 64 inputs cannot be quantized in groups of 48"),
        ({"layout": "awq", "bits": 8}, "AWQ's layout has 4 bits and these weights have 8"),
        ({"rows": 0}, "rows is 0: give at least 1"),
        ({"model": Path("nowhere")}, "nowhere is no folder"),
        ({"damping": -1.0}, "damping is -1.0"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(exported, tmp_path, changes, says):
    module = import_module("chapters.10_finetuning.quantize")
    settings = {"model": exported[0], "data": exported[1], "group": 32, "output": tmp_path} | changes
    with pytest.raises(CourseError, match=says):
        module.run(module.QuantizeConfig(**settings))


def test_calibration_text_of_ones_own_may_be_prose(exported, tmp_path):
    """Of one line each, which the rules for code would drop."""
    module, text = import_module("chapters.10_finetuning.quantize"), tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number}.txt").write_text(f"The house of number {number} stands at the end of the road, and nobody has been there. " * 20)
    config = module.QuantizeConfig(model=exported[0], data=text, output=tmp_path / "out")
    found = module.prepared_text(config, load_pretrained(exported[0]), Console(quiet=True))
    assert len(found.training) + len(found.held_out) == 30


def test_the_refusal_comes_before_the_weights_and_names_groups_that_fit(exported, tmp_path, monkeypatch):
    module = import_module("chapters.10_finetuning.quantize")
    monkeypatch.setattr("shared.model.hf.pretrained.load_pretrained", None)
    with pytest.raises(CourseError, match="in groups of 48.*Groups that fit all layers: 32, 64; or null for whole rows.$"):
        module.run(module.QuantizeConfig(model=exported[0], data=exported[1], group=48, output=tmp_path))


def test_groups_that_fit_are_those_that_the_layers_take():
    """SmolLM2-135M's sizes; the group of 128 that its user met first is none of them."""
    config = ModelConfig(vocab_size=9, hidden_size=576, num_hidden_layers=1, num_attention_heads=9, intermediate_size=1536)
    with torch.device("meta"):
        model = TransformerModel(config)
    with pytest.raises(ValueError, match="576 inputs cannot be .* groups of 128.*Groups that fit all layers: 32, 64, 96, 192; or"):
        require_sizes(model, Rounding(4, 128))
    for group in (32, 64, 96, 192, None):
        require_sizes(model, Rounding(4, group))


def test_the_calibration_text_is_said_and_warned_of_where_it_is_the_courses_and_the_model_is_not(tmp_path):
    module = import_module("chapters.10_finetuning.quantize")
    for run, start in (("base", None), ("tuned", tmp_path / "base"), ("of_another", tmp_path / "folder")):
        (tmp_path / run).mkdir()
        (tmp_path / run / "config.yaml").write_text(json.dumps({"start_from": start and str(start)}))
    said = {name: module.calibration_lines(module.QuantizeConfig(model=tmp_path / name)) for name in
            ("base/model", "tuned/model", "of_another/model", "folder")}  # fmt: skip
    assert [len(lines) for lines in said.values()] == [1, 1, 2, 2] and "embedded corpus, Python source" in said["base/model"][0]
    assert "give --data" in said["folder"][1]
    [line] = module.calibration_lines(module.QuantizeConfig(model=tmp_path / "folder", data=Path("texts")))
    assert "64 rows of 256 tokens of texts" in line


def test_enlarged_channels_leave_the_model_what_it_was():
    module = import_module("chapters.10_finetuning.quantization_table")
    model, twin = (TransformerModel(ModelConfig(**module.MODEL | {"num_hidden_layers": 1}), seed=0).double() for _ in range(2))
    module.enlarge_channels(model, 0)
    ids = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), twin(ids), rtol=0, atol=1e-6)
    norms = model.stack.blocks["0"].attention_norm.weight
    assert (norms > 20).sum() == module.LARGE


def test_the_divergence_is_that_of_the_definition():
    module = import_module("chapters.10_finetuning.quantization_table")
    logits = (torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    first, second = (torch.nn.Embedding.from_pretrained(each) for each in logits)

    def model_of(table):
        return lambda ids: table(ids)

    found = module.kl_of(model_of(first), model_of(second), [{"input_ids": torch.arange(5).view(1, 5)}])
    p, q = (table.weight.double().softmax(dim=-1) for table in (first, second))
    assert found == pytest.approx(sum(p[i, j] * math.log(p[i, j] / q[i, j]) for i in range(5) for j in range(7)).item() / 5)


@pytest.mark.slow
def test_the_tables_are_made_by_a_command(tmp_path):
    words = ("--seeds", 1, "--steps", 8, "--windows", 8, "--calibration", 8, "--output", tmp_path / "out")
    done = run_script(CHAPTER / "quantization_table.py", "--experiment", "outliers", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "outliers.md").read_text().splitlines()
    assert len(lines) == 2 + 6 and all(line.count("|") == lines[0].count("|") for line in lines)
