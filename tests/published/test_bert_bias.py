"""An untied BERT has a bias of its own in the head: cls.predictions.decoder.bias, which a tied one shares with cls.predictions.bias."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from shared.model.hf.pretrained import load_pretrained, save_pretrained

IDS = torch.arange(1, 17)[None]


@pytest.mark.parametrize("tied", [True, False])
def test_the_heads_bias_is_read_and_written(tied, tmp_path):
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    theirs = BertForMaskedLM(BertConfig(**sizes, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        theirs.cls.predictions.decoder.bias.normal_()
        wanted = theirs(IDS).logits
    theirs.save_pretrained(tmp_path / "theirs")
    mine = load_pretrained(tmp_path / "theirs").eval()
    with torch.no_grad():
        torch.testing.assert_close(mine(IDS), wanted, rtol=1e-5, atol=1e-5)
        save_pretrained(mine, tmp_path / "mine")
        back, said = BertForMaskedLM.from_pretrained(tmp_path / "mine", output_loading_info=True)
        assert said["missing_keys"] <= {"cls.predictions.bias"}  # which the untied model has, and does not add
        torch.testing.assert_close(back.eval()(IDS).logits, wanted, rtol=1e-5, atol=1e-5)
