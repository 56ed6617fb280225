"""Key-value caches that chapter 12 may bring: growing, preallocated, a ring of a sliding window. Each gives the whole sequence's logits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.model.config import ModelConfig
from shared.model.context import KeyValueCache
from shared.model.masks import Causal, Documents, Full, Padding, Prefix, Window, to_attention_mask
from shared.model.transformer import TransformerModel

CONFIG = ModelConfig(
    vocab_size=97, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64
)
IDS = torch.randint(97, (2, 19), generator=torch.Generator().manual_seed(0))
WINDOW = 5
FAMILIES = {
    "LLaMA": CONFIG,
    "eager": replace(CONFIG, attention="eager"),
    "learned": replace(CONFIG, position="learned"),
    "ALiBi": replace(CONFIG, position="alibi"),
    "relative": replace(CONFIG, position="relative"),
    "window": replace(CONFIG, sliding_window=WINDOW),
    "ALiBi, window": replace(CONFIG, position="alibi", sliding_window=WINDOW),
    "relative, window": replace(CONFIG, position="relative", sliding_window=WINDOW),
    "mixed windows": replace(CONFIG, sliding_window=WINDOW, layer_types=("full_attention", "sliding_attention", "sliding_attention")),
    "mixed windows, eager": replace(
        CONFIG, sliding_window=WINDOW, layer_types=("sliding_attention", "full_attention", "full_attention"), attention="eager"
    ),
}


class Slots(KeyValueCache):
    """Keys and values in tensors of a size that never changes; position p is kept in slot p % size, so a full one is a ring.

    sizes: slots for each layer type. A ring needs room for the window of the first new query and all new ones.
    """

    def __init__(self, config: ModelConfig, batch: int, sizes: dict[str, int]):
        self.config, self.length, self.sizes = config.resolved(), 0, sizes
        self.held = {name: torch.full((size,), -1) for name, size in sizes.items()}  # the position in each slot
        shape = batch, self.config.num_key_value_heads
        self.kept = [
            torch.full((2, *shape, sizes[layer_type], self.config.head_dim), torch.nan, dtype=torch.float64)
            for layer_type in self.config.layer_types
        ]

    def keys(self, layer_type: str, queries: Tensor) -> Tensor:
        self.held[layer_type][queries % self.sizes[layer_type]] = queries
        return self.held[layer_type]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.kept[layer]
        slots = torch.arange(self.length, self.length + keys.shape[2]) % kept.shape[3]
        kept[0][:, :, slots], kept[1][:, :, slots] = keys, values
        return kept[0].nan_to_num(), kept[1].nan_to_num()


def logits_by_pieces(model: TransformerModel, cache: KeyValueCache, cuts: tuple[int, ...]) -> Tensor:
    found = []
    for piece in IDS.split(cuts, dim=1):
        found.append(model(piece, cache=cache))
        cache.length += piece.shape[1]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("cuts", [(1,) * 19, (7, 1, 11), (18, 1), (19,)])
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_preallocated_cache_gives_the_logits_of_the_whole_sequence(config, cuts):
    """More slots than keys: the empty ones are seen by nobody, not even by the kernel's causal flag."""
    model = TransformerModel(config).double().eval()
    for slots in (32, 19):
        cache = Slots(config, 2, {"full_attention": slots, "sliding_attention": slots})
        with torch.no_grad():
            torch.testing.assert_close(logits_by_pieces(model, cache, cuts), model(IDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [(1,) * 19, (3, 2, 3, 1, 3, 3, 1, 3), (1, 3) * 4 + (3,)])
@pytest.mark.parametrize("name", ["window", "ALiBi, window", "relative, window", "mixed windows", "mixed windows, eager"])
def test_a_ring_of_a_sliding_window_gives_the_logits_of_the_whole_sequence(name, cuts):
    config = FAMILIES[name]
    model = TransformerModel(config).double().eval()
    cache = Slots(config, 2, {"full_attention": 19, "sliding_attention": WINDOW + max(cuts) - 1})
    with torch.no_grad():
        torch.testing.assert_close(logits_by_pieces(model, cache, cuts), model(IDS), rtol=0, atol=1e-12)
    sliding = config.resolved().layer_types.index("sliding_attention")
    assert cache.kept[sliding].shape[3] == WINDOW + max(cuts) - 1 < 19, "a window's keys take a window's memory"


@pytest.mark.parametrize("slots", [19, 32])
def test_a_cache_that_says_its_keys_obeys_other_rules_too(slots):
    model, valid = TransformerModel(CONFIG).double().eval(), torch.ones(2, 19, dtype=torch.bool)
    valid[1, 3:6] = False
    documents = torch.arange(19).expand(2, -1) // 8
    for mask, pattern in ((Padding(valid), None), (Documents(documents), None), (None, Causal() | Prefix(4)), (None, Causal() & Window(4))):
        cache = Slots(CONFIG, 2, {"full_attention": slots})
        with torch.no_grad():
            found = model(IDS, cache=cache, mask=mask, pattern=pattern)
            torch.testing.assert_close(found, model(IDS, mask=mask, pattern=pattern), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [Causal(), Full(), Causal() & Window(3)], ids=str)
@pytest.mark.parametrize("bias", [None, torch.zeros(1, 2, 1, 3)], ids=["plain", "biased"])
@pytest.mark.parametrize("sdpa", [True, False])
def test_keys_out_of_order_are_never_left_to_a_shortcut(rule, bias, sdpa):
    """A ring after position 4 with slots for 3, 4 and none yet."""
    found = to_attention_mask(rule, torch.tensor([4]), torch.tensor([3, 4, -1]), bias, sdpa=sdpa, in_order=False)
    seen = found.allowed if found.allowed is not None else found.bias[:, :1] == 0
    assert not found.causal and seen.squeeze().tolist() == [True, True, False]


def test_without_keys_of_its_own_a_cache_holds_all_positions_in_order():
    assert KeyValueCache().keys("full_attention", torch.arange(3)) is None
    with pytest.raises(NotImplementedError, match="KeyValueCache must define update"):
        KeyValueCache().update(0, torch.zeros(1), torch.zeros(1))
