"""The mode sft as its user starts it: conversations made on the spot or given, answers before and after, an export that others read."""

import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import train
from tuned_runs import tuned_config, tuned_file

from shared.data.tokenizer import TextTokenizer
from shared.loss import IGNORED
from shared.model.hf.pretrained import load_pretrained
from shared.trainer.run import build, train_model


@pytest.fixture(scope="module")
def finished(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("tuned")
    done = train(tuned_file(folder, base))
    assert done.returncode == 0, done.stderr + done.stdout
    return folder / "run", done.stdout


def test_a_run_reports_tasks_before_and_after(finished):
    run, said = finished
    results = json.loads((run / "results.json").read_text())
    assert {"held-out loss on answers", "held-out tasks right before", "held-out tasks right after"} <= results["summary"].keys()
    assert len(results["answered"]) == 12 and [row[1] for row in results["accuracy"]] == [2] * 6 + [12]
    page = (run / "report.html").read_text()
    for shown in ("Held-out tasks", "Answers side by side", "What was trained", "right before", results["answered"][0]["wanted"]):
        assert shown in page
    assert "conversations" in said and "The weights of" in said


def test_a_run_says_which_tokens_its_model_has_no_rows_for(finished, base):
    rows = [json.loads((folder / "model" / "config.json").read_text())["vocab_size"] for folder in (base, finished[0])]
    line = f"{rows[1] - rows[0]} of the tokenizer's {rows[1]} tokens have no row in them: theirs begin at the mean."
    assert rows[0] < rows[1] and line in " ".join(finished[1].split())


def test_the_export_is_read_by_transformers_with_its_template_and_end(finished):
    import transformers

    folder = finished[0] / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert theirs.generation_config.eos_token_id == end and tokenizer.decode(ids[0]).endswith("<|im_start|>assistant\n")
    assert len(theirs.model.embed_tokens.weight) == len(tokenizer) == TextTokenizer.load(folder).vocab_size
    ours = load_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_only_what_the_assistant_says_is_trained(tmp_path, base):
    run = build(tuned_config(tmp_path, base), Console(quiet=True))
    loader, _ = run.mode.loaders(run.config, run.strategy)
    (batch, *_) = next(iter(loader))
    row, targets = batch["input_ids"][0], batch["targets"][0]
    written = run.mode.tokenizer.decode(targets[targets != IGNORED].tolist(), keep_special=True)
    whole = run.mode.tokenizer.decode(row.tolist(), keep_special=True)
    assert "<|im_start|>" in whole and "<|im_start|>" not in written and written.count("<|im_end|>") == whole.count("<|im_start|>user")
    totals = run.engine.objective(run.engine.model.eval(), batch)
    logits = run.engine.model(batch["input_ids"], positions=batch["positions"], mask=documents(batch))
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    torch.testing.assert_close(totals.loss_sum, wanted, rtol=1e-4, atol=1e-4)
    assert int(totals.token_count) == int((batch["targets"] != IGNORED).sum())


def documents(batch):
    from shared.model.masks import Documents

    return Documents(batch["documents"])


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, base, finished):
    path = tuned_file(tmp_path, base, engine={"log_every": 1})
    left = train(path, interrupt_after=r"step\s+3 of 6")
    assert left.returncode == 130, left.stderr
    again = train(path)
    assert again.returncode == 0 and "Going on from step" in again.stdout, again.stderr
    one, other = (load_file(folder / "checkpoints/step-00000006/weights.safetensors") for folder in (finished[0], tmp_path / "run"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_conversations_of_ones_own_in_any_shape(tmp_path, base):
    records = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}."} for n in range(200)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    tasks = [{"kind": "own", "prompt": "Say 3.", "answer": "It is 3.", "check": "exact"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in tasks))
    config = tuned_config(
        tmp_path, base, f"chats.sources=[{{path: {tmp_path / 'mine.jsonl'}}}]", f"instructions.file={tmp_path / 'tasks.jsonl'}", "steps=2",
        "schedule.decay_steps=0", "chats.system=Be brief.",
    )  # fmt: skip
    results = train_model(config, Console(quiet=True))
    assert [each.kind for each in results.judged.answered] == ["own"] and results.judged.example
    shown = "".join(piece for piece, _ in results.judged.example)
    assert "Be brief." in shown and "".join(piece for piece, trained in results.judged.example if trained).endswith("<|im_end|>")


@pytest.mark.parametrize("words", [["data.seq=32"], ["data.strategy=sequential"]])
def test_moved_middles_limit_only_pretraining(tmp_path, base, capsys, words):
    assert tuned_config(tmp_path, base, "data.fim.rate=0.5", *words).mode == "sft"
    with pytest.raises(SystemExit):
        tuned_config(tmp_path, base, "data.fim.rate=0.5", "mode=pretrain", *words)
    assert "middles" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["start_from=null"], "mode is sft and start_from is null"),
        (["chats.template=pairs"], "pairs is for an encoder-decoder"),
        (["instructions.tasks=301"], "instructions.tasks is 301"),
        (["instructions.examples=0"], "instructions.examples is 0"),
        (["adapter.rank=0"], "adapter.rank is 0"),
        (["adapter.kind=prompt", "adapter.virtual_tokens=128"], "a row has no room"),
        (["mode=pretrain", "adapter.rank=4"], "adapter is for the modes that fine-tune"),
        (["chats.held_out_share=0"], "held_out_share is 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path, base, capsys, words, sentence):
    with pytest.raises(SystemExit) as left:
        tuned_config(tmp_path, base, *words)
    assert left.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())
