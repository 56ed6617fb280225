"""A published model as start: its own template and special tokens are used, said, kept in the export, and never replaced in silence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from trainer_runs import train
from tuned_runs import tuned_config, tuned_file

from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.trainer.run import announce, build
from shared.trainer.talk.opened import opened

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|turn_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NAMES = {"bos_token": "<|end|>", "eos_token": "<|turn_end|>", "pad_token": "<|fim_pad|>", "unk_token": {"content": "<|extra_0|>"}}


@pytest.fixture(scope="module")
def published(base, tmp_path_factory) -> Path:
    """The base model as its makers would publish it: with a template in its own tokens, which are named."""
    folder = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(base / "model", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | NAMES))
    return folder


def said_at_start(config) -> str:
    console = Console(record=True, width=200)
    run = build(config, console)
    announce(run.config, run.mode, run.mode.start, torch.device("cpu"), console)
    return console.export_text()


def test_the_models_own_template_is_the_default_and_is_said(published, tmp_path):
    said = said_at_start(tuned_config(tmp_path, published))
    assert "Chat template: the model's own." in said and "New in the vocabulary" not in said


def test_a_model_without_one_gets_chatml_and_its_new_tokens_are_said(base, tmp_path):
    said = said_at_start(tuned_config(tmp_path, base, adapter={"rank": 2}))
    assert "Chat template: chatml, as the model has none." in said
    assert "<|im_start|>, <|im_end|>, and the adapter leaves their embeddings as they are." in said


def test_another_template_is_said_and_under_an_adapter_refused_where_it_adds_tokens(published, tmp_path):
    said = said_at_start(tuned_config(tmp_path, published, "chats.template=chatml"))
    assert "Chat template: chatml, in place of the model's own." in said and "New in the vocabulary" in said
    with pytest.raises(CourseError, match=r"chats\.template adds <\|im_start\|>, <\|im_end\|> .*give chats\.template auto"):
        build(tuned_config(tmp_path, published, "chats.template=chatml", adapter={"rank": 2}), Console(quiet=True))


def test_the_export_keeps_every_named_token_and_transformers_pads_and_generates_with_it(published, tmp_path):
    done = train(tuned_file(tmp_path, published, adapter={"rank": 2}))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    names = {role: getattr(tokenizer, role) for role in NAMES}
    assert names == {role: name["content"] if isinstance(name, dict) else name for role, name in NAMES.items()}
    chats = [[{"role": "user", "content": text}] for text in ("hello", "What is 3 plus 4?")]
    rows = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    made = model.generate(**rows, max_new_tokens=4, do_sample=False)
    alone = tokenizer.apply_chat_template(chats[0], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    wanted = model.generate(**alone, max_new_tokens=4, do_sample=False)
    answer = made[0, rows["input_ids"].shape[1] :].tolist()
    assert answer[: wanted.shape[1] - alone["input_ids"].shape[1]] == wanted[0, alone["input_ids"].shape[1] :].tolist()
    assert tokenizer.chat_template == TEMPLATE
    assert TextTokenizer.load(tmp_path / "run" / "adapter").names.keys() == {"bos_token", "pad_token", "unk_token"}


def test_a_tokenizer_that_grows_keeps_the_names_of_its_tokens(published):
    assert TextTokenizer.load(published).with_special(["<|new|>"]).names["pad_token"] == NAMES["pad_token"]


def test_new_tokens_under_an_adapter_are_those_of_the_run_in_its_checkpoint(base, tmp_path):
    done = train(tuned_file(tmp_path, base, adapter={"rank": 2}))
    assert done.returncode == 0, done.stderr
    wanted, _, _ = opened(tmp_path / "run")
    for name in ("model", "adapter"):
        shutil.rmtree(tmp_path / "run" / name)
    assert torch.equal(opened(tmp_path / "run")[0].embedding.tokens.weight, wanted.embedding.tokens.weight)


@pytest.mark.parametrize("adapter", [{"rank": 4, "dropout": 0.1, "targets": ["all-linear"]}, {"kind": "prompt", "virtual_tokens": 3}])
def test_an_adapter_s_checkpoint_is_talked_to_over_the_base_of_its_run(published, tmp_path, adapter):
    done = train(tuned_file(tmp_path, published, adapter=adapter, optimizer={"name": "adamw", "lr": 0.01}))
    assert done.returncode == 0, done.stderr
    run, ids = tmp_path / "run", torch.randint(0, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    whole, _, _ = opened(run)
    size, before = whole.config.vocab_size, adapter.get("virtual_tokens", 0)
    read = torch.cat([torch.arange(size, size + before).expand(2, -1), ids], dim=1)
    for name in ("model", "adapter"):
        shutil.rmtree(run / name, ignore_errors=True)
    model, tokenizer, folder = opened(run)
    first, _, _ = opened(published)
    with torch.no_grad():
        found, wanted, base = model.eval()(read), whole.eval()(read), first.eval()(ids)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (wanted[:, before:] - base).abs().max() > 1e-2 and tokenizer.vocab_size == size
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    opened(next(iter(sorted((run / "checkpoints").glob("step-*")))))  # one of its checkpoints by name
    shutil.move(published, tmp_path / "gone")
    try:
        with pytest.raises(CourseError, match="start_from is .*does not exist"):
            opened(run)
    finally:
        shutil.move(tmp_path / "gone", published)
