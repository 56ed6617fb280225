"""The studies of chapters 10 to 12 on a real model, on one so small that it shows nothing but that they run; and what they measure with."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from chapters.pretrained_model import TEXT, Pretrained
from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.template import FILE
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel

quantization = import_module("chapters.10_finetuning.pretrained_quantization")
forgetting = import_module("chapters.10_finetuning.pretrained_forgetting")
brevity = import_module("chapters.11_preferences.pretrained_brevity")
temperature = import_module("chapters.12_grpo.pretrained_temperature")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with random weights, a tokenizer and a chat template, as a published one has them."""
    folder = tmp_path_factory.mktemp("tiny")
    trained = TextTokenizer.train([TEXT] * 4, 300, sentinels=0).with_special(["<|im_start|>", "<|im_end|>"])
    tokenizer = TextTokenizer(trained.tokenizer, end="<|im_end|>")
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                         max_position_embeddings=1024, initializer_range=0.1)  # fmt: skip
    save_pretrained(TransformerModel(config, seed=0), folder, token_ids={"eos_token_id": tokenizer.end_id})
    tokenizer.save_pretrained(folder, 1024)
    (folder / FILE).write_text(TEMPLATE)
    return folder


def test_answers_are_trained_on_with_their_end_and_questions_are_not(folder):
    pretrained = Pretrained(folder)
    batch = pretrained.batch([("What is it?", "A ferry."), ("And the bell?", "From a school.")])
    trained = batch["targets"][batch["targets"] != -100].tolist()
    assert pretrained.tokenizer.decode(trained, keep_special=True) == "A ferry.<|im_end|>From a school.<|im_end|>"
    first = batch["documents"][0] == 0
    assert batch["input_ids"][0, first].tolist()[: len(pretrained.prompt("What is it?"))] == pretrained.prompt("What is it?")
    assert batch["positions"][0].tolist() == [*range(int(first.sum())), *range(int((~first).sum()))]


def test_bits_per_byte_are_those_of_plain_cross_entropy(folder):
    pretrained = Pretrained(folder)
    model, ids = pretrained.model(), [pretrained.tokenizer.end_id, *pretrained.tokenizer.encode("The bell came from a school. é")]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0]
    nats = F.cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="sum").item()
    found = pretrained.bits_per_byte(model, "The bell came from a school. é")
    assert found == pytest.approx(nats / torch.log(torch.tensor(2.0, dtype=torch.float64)).item() / 31, rel=1e-5)


def test_quantization_is_compared_with_the_model_as_it_was(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantization, "texts", lambda kind, side: [TEXT, TEXT[::-1]] if kind == "code" else [TEXT])
    config = quantization.StudyConfig(model=folder, seeds=2, seq=32, rows=4, awq_rows=2, held_out_rows=2, output=tmp_path)
    measured = quantization.Measured(folder, config)
    eight_bits = measured.trial({"method": "nearest", "group": 64, "on": None, "rows": None, "symmetric": True}, 0)
    kept = measured.reference("code").clone()
    assert kept.shape[1] == measured.model().config.vocab_size and eight_bits["code: KL"] > 0
    assert quantization.Measured(folder, config).log_probabilities(measured.model(), "code").equal(kept)
    quantization.run(config)
    table = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| rounding, by 64", "| rounding, by 32"] and "act order" in table[-1]
    assert " to " in next(line for line in table if "GPTQ, by 64, prose" in line)  # the range over the seeds
    assert "by 64" in capsys.readouterr().out


def test_shares_are_of_roundings_loss_with_the_same_groups():
    def figures(added):
        return [{f"{kind}: {what}": each for kind in quantization.KINDS for what in ("added", "KL")} for each in added]

    results = {"rounding, by 64": figures([0.4]), "rounding, by 32": figures([0.2]), "GPTQ, by 32, code": figures([0.1, 0.05, 0.15])}
    assert "0.100 (0.050 to 0.150) | 50% (25% to 75%)" in quantization.table_of(results)[-1]


def test_what_was_learned_and_kept_is_counted_from_answers(folder, tmp_path, monkeypatch):
    config = forgetting.StudyConfig(model=folder, seeds=1, rates=(0.001,), steps=(1, 2), rank=2, new_tokens=4, output=tmp_path)
    pretrained = Pretrained(folder)
    said = ["It weighs 380 Grams and comes from PORTUGAL."] * len(forgetting.FACTS)
    said += ["Paris, and seven Pacific spiders"] * len(forgetting.KNOWN)
    monkeypatch.setattr(Pretrained, "answers", lambda self, model, questions, new_tokens: said[: len(questions)])
    found = forgetting.asked(pretrained, pretrained.model(), config, 3)
    assert (found["learned, step 3"], found["kept, step 3"]) == (2, 3)
    monkeypatch.undo()
    forgetting.run(config)
    table = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split(" | ")[:2] for line in table[2:]] == [["| before", "0"], ["| 0.001", "1"], ["| 0.001", "2"]]


def test_pairs_are_a_first_sentence_and_the_whole_answer(folder, tmp_path, monkeypatch):
    study = brevity.Study(Pretrained(folder), brevity.StudyConfig(model=folder))
    study.answers = {"a": "It is a bird. It flies.", "b": "It is a bird.", "c": "Is it? Yes, it is."}
    assert study.pairs_of(("a", "b", "c")) == [("a", "It is a bird.", "It is a bird. It flies."), ("c", "Is it?", "Is it? Yes, it is.")]
    answers = Pretrained.answers
    short = lambda self, model, questions, new_tokens: [f"{each} Yes. No." for each in answers(self, model, questions, 3)]  # noqa: E731
    monkeypatch.setattr(Pretrained, "answers", short)
    config = brevity.StudyConfig(model=folder, seeds=1, steps=(1, 2), pairs=2, rank=2, new_tokens=4, output=tmp_path)
    brevity.run(config)
    rows = [line.split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    assert [row[0] for row in rows] == ["| 0", "| 1", "| 2"] and (rows[0][3], rows[0][4]) == ("0%", "0.00")  # as the reference, no margin


def test_temperatures_are_compared_over_seeds(folder, tmp_path):
    assert temperature.is_right("16 + 13 = 29.", 29) and not temperature.is_right("29 is 16 + 13", 29) and not temperature.is_right("", 0)
    config = temperature.StudyConfig(model=folder, seeds=2, temperatures=(0.0, 1.0), sums=2, answers=2, new_tokens=3, output=tmp_path)
    temperature.run(config)
    rows = [line.split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    assert [row[0] for row in rows] == ["| 0", "| 1"] and rows[0][2] == "" and float(rows[1][4].split()[0]) > 1  # nats, of random weights


def test_settings_that_cannot_be_are_refused(folder, tmp_path):
    wrong_ones = (quantization, {"rows": 0}), (forgetting, {"steps": (2, 1)}), (brevity, {"pairs": 0}), (temperature, {"sums": 0})
    for module, wrong in wrong_ones:
        with pytest.raises(CourseError):
            module.run(module.StudyConfig(model=folder, output=tmp_path, **wrong))
