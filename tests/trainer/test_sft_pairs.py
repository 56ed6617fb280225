"""Text-to-text fine-tuning of an encoder-decoder (T5) through the mode sft."""

import io

import pytest
import yaml
from rich.console import Console
from trainer_runs import settings_file
from tuned_runs import tuned_file

from shared.data.tokenizer import TextTokenizer
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.rl.generation import Drawing
from shared.trainer.config import TrainerConfig
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words
from shared.trainer.talk.chat import AnswerSettings, open_talk

T5 = {
    "architecture": "encoder-decoder", "position": "relative", "attention_scale": 1.0, "hidden_act": "relu", "gated": False,
    "norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128, "logit_scale": 32**-0.5,
}  # fmt: skip


@pytest.mark.parametrize("words", [[], ["adapter.rank=2"]])
def test_pairs_of_texts_train_an_encoder_decoder_that_answers_as_its_report_says(tmp_path, words):
    tokenizer = TextTokenizer.train(["What is 3 plus 4? Write as a list with dashes: " * 20], 512, 4)
    model = TransformerModel(ModelConfig(vocab_size=tokenizer.vocab_size, **T5))
    save_pretrained(model, tmp_path / "t5", token_ids={"eos_token_id": tokenizer.end_id, "pad_token_id": tokenizer.end_id})
    tokenizer.save_pretrained(tmp_path / "t5", 128)
    file = tuned_file(tmp_path, tmp_path / "t5", report={"new_tokens": 6}, instructions={"examples": 60, "tasks": 6})
    settings = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(settings | {"model": {}}))
    config = parse_words(TrainerConfig, [str(file), "chats.template=pairs", *words])
    results = train_model(config, Console(file=io.StringIO()))
    trained = load_pretrained(tmp_path / "run" / "model")
    assert any((a != b).any() for a, b in zip(trained.parameters(), model.parameters(), strict=True))
    talk = open_talk(tmp_path / "run", AnswerSettings(Drawing(temperature=0.0), 6), None)
    for task in results.judged.answered[:2]:
        assert "".join(talk.answer(task.prompt)) == task.after


def test_a_chat_template_is_not_for_an_encoder_decoder(tmp_path, capsys):
    save_pretrained(TransformerModel(ModelConfig(vocab_size=64, **T5)), tmp_path / "t5")
    file = settings_file(tmp_path, tmp_path / "prepared")
    settings = yaml.safe_load(file.read_text()) | {"mode": "sft", "start_from": str(tmp_path / "t5"), "model": {}}
    file.write_text(yaml.safe_dump(settings))
    for word, template in (("chatml", "'chatml'"), ("null", "null")):
        with pytest.raises(SystemExit):
            parse_words(TrainerConfig, [str(file), f"chats.template={word}"])
        said = " ".join(capsys.readouterr().err.split())
        assert f"chats.template is {template} and" in said and "pairs is for an encoder-decoder" in said
