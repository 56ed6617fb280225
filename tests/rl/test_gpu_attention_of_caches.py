"""The attention over a cache that a GPU takes where heads share keys: by a bias, with the numbers of `cached_attention`."""

import torch

from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.rl.decoding_cache import DecodingCache

SHARED = ModelConfig(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32
)


class Biased(DecodingCache):
    def attend(self, attention, queries, keys, values, *_):
        return self.attend_biased(attention, queries, torch.cat([keys, values], dim=1))


@torch.no_grad()
def test_prompts_and_steps_have_the_same_logits_either_way():
    model = TransformerModel(SHARED).eval()
    found = []
    for kind in (DecodingCache, Biased):
        cache = kind(model, rows=3, places=16, fused=False)
        found.append([cache.read([[1, 2, 3], [4, 5, 6, 7, 8], [9]]), cache.step([10, 11, 12]), cache.step([13, 14, 15])])
    for plain, biased in zip(*found, strict=True):
        torch.testing.assert_close(biased, plain, rtol=1e-5, atol=1e-5)
