"""GGUF as its user meets it: a run's model exported by the command, and the file taken by training, planning, evaluation and sampling."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from transformers import AutoTokenizer
from tuned_runs import tuned_config

from shared.course.cli import cli
from shared.course.errors import SettingError
from shared.finetune.chat.template import CHATML
from shared.finetune.gguf import packaged
from shared.finetune.gguf.modelfile import write_modelfile
from shared.model.hf.pretrained import load_pretrained
from shared.trainer.planner.opening import named_shape
from shared.trainer.run import build
from shared.trainer.talk.opened import opened
from shared.trainer.weights import find_initial_weights


def course(*words: object):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def file(base, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    done = course("export", base, "--gguf", "f32", "--output", tmp_path / "made.gguf")
    assert done.exit_code == 0 and "made.gguf: " in done.output
    return tmp_path / "made.gguf"


def test_an_exported_run_is_one_to_start_from_plan_sample_and_evaluate(base, file, tmp_path):
    wanted, ids = load_pretrained(base / "model").eval(), torch.arange(1, 17)[None]
    assert named_shape(str(file)).hidden_size == wanted.config.hidden_size and not Path("runs").exists()  # by its metadata alone
    run = build(tuned_config(tmp_path / "tuned", file), Console(quiet=True))
    with torch.no_grad():
        assert torch.equal(run.engine.model.eval()(ids)[..., : wanted.config.vocab_size], wanted(ids))
        assert torch.equal(opened(file)[0].eval()(ids), wanted(ids))
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 20)
    done = course("eval", file, "--data", text)
    assert done.exit_code == 0 and json.loads(Path("runs/pretrained/made/eval.json").read_text())["tasks"]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["pretrained"]


def filled(modelfile: str, messages: list[dict[str, str]]) -> str:
    """What Ollama's template makes of messages: Go's {{ range }} over them, with a `-` that removes white space before it."""
    template = modelfile.split('TEMPLATE """')[1].split('"""')[0]
    before, _, rest = template.partition("{{- range .Messages }}")
    each, after = rest.split("{{ end }}")
    made = (each.replace("{{ .Role }}", message["role"]).replace("{{ .Content }}", message["content"]) for message in messages)
    return before + "".join(made) + after


REFUSES = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"


@pytest.mark.parametrize("kind", ["chatml", "with a system prompt", "another", "without system prompts", "none"])
def test_the_modelfile_has_chatmls_text_the_models_system_prompt_and_no_guess(base, tmp_path, kind):
    folder, file = tmp_path / "model", tmp_path / "made-f16.gguf"
    shutil.copytree(base / "model", folder)
    template = {"chatml": CHATML, "with a system prompt": SYSTEM + CHATML, "another": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    template["without system prompts"] = REFUSES + CHATML
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if kind in template:
        (folder / "chat_template.jinja").write_text(template[kind])
    path, said = write_modelfile(folder, file)
    written = path.read_text()
    assert path == tmp_path / "made-f16.Modelfile" and written.startswith("FROM ./made-f16.gguf\n")
    if kind in ("another", "without system prompts", "none"):
        assert "PARAMETER stop <" not in written and ("not ChatML" in said) == (kind != "none")
        return
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": role, "content": f"{role} says é {{x}}"} for role in ("system", "user", "assistant", "user")]
    assert filled(written, messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "PARAMETER stop <|im_end|>\n" in written and ('SYSTEM """Be kind."""' in written) == (kind != "chatml")


def test_the_default_file_is_in_the_run_and_a_run_without_a_model_is_refused(base, tuned_run, tmp_path):
    done = course("export", base, "--gguf", "q8_0")
    assert done.exit_code == 0 and (base / f"{base.name}-q8_0.gguf").is_file()
    assert "q8_0.Modelfile: for Ollama, it continues a text" in done.output.replace("\n", " ")
    (base / f"{base.name}-q8_0.Modelfile").unlink()
    (base / f"{base.name}-q8_0.gguf").unlink()
    refused = course("export", tuned_run, "--gguf", "f16")
    assert refused.exit_code != 0 and "has checkpoints and no exported model yet" in refused.output


@pytest.fixture
def tuned_run(base, tmp_path) -> Path:
    """The base's run as it is before its end."""
    folder = tmp_path / "stopped"
    folder.mkdir()
    for name in ("checkpoints", "config.yaml", "tokenizer"):
        (folder / name).symlink_to(base / name)
    return folder


def test_a_name_without_its_package_says_what_installs_it_and_a_folder_of_that_name_comes_first(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(packaged.PACKAGED, "smollm2", ("no_such_package", "model.gguf"))
    with pytest.raises(SettingError, match="which is not installed: `make install GROUP=pretrained`"):
        find_initial_weights(Path("smollm2"))
    Path("smollm2").symlink_to(base)
    assert find_initial_weights(Path("smollm2")).folder == Path("smollm2/model")
