"""Dummies in every place where a later chapter will put something of its own: builders, block runner, cache, absent parts, roles."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shared.loop import train
from shared.loss import next_token_objective
from shared.model.attention import Attention, eager_attention, sdpa_attention
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import KeyValueCache
from shared.model.feed_forward import build_feed_forward
from shared.model.init import materialize
from shared.model.masks import AttentionMask, Documents, Mask
from shared.model.norm import build_norm
from shared.model.roles import parameters_by_role
from shared.model.transformer import PLAIN, TransformerModel, build_linear, keep_part

CONFIG = ModelConfig(
    vocab_size=97, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64
)
IDS = torch.randint(97, (2, 19), generator=torch.Generator().manual_seed(0))
FAMILIES = {
    "LLaMA": CONFIG,
    "GPT-2": replace(CONFIG, position="learned", norm="layer_norm", gated=False, hidden_act="gelu_tanh", tie_word_embeddings=True),
    "ALiBi": replace(CONFIG, position="alibi"),
    "relative": replace(CONFIG, position="relative"),
    "windows": replace(CONFIG, sliding_window=5, layer_types=("full_attention", "sliding_attention", "sliding_attention")),
}
by_family = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)


class LowRank(nn.Module):
    """A linear layer with a learned addition of rank 2: chapter 10 in little."""

    def __init__(self, inner: nn.Module, in_features: int, out_features: int):
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Parameter(torch.zeros(2, in_features)), nn.Parameter(torch.zeros(out_features, 2))

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.T @ self.up.T


def test_a_linear_builder_is_asked_for_every_linear_layer_by_name():
    asked = []

    def linear(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
        asked.append(name)
        return build_linear(name, in_features, out_features, bias)

    TransformerModel(CONFIG, replace(PLAIN, linear=linear))
    each_block = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]
    assert sorted(asked) == sorted(each_block * 3 + ["head"])


def test_a_linear_layer_with_an_addition_starts_as_the_plain_one_and_learns():
    def linear(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
        inner = build_linear(name, in_features, out_features, bias)
        return LowRank(inner, in_features, out_features) if name in ("q_proj", "v_proj") else inner

    plain, changed = TransformerModel(CONFIG), TransformerModel(CONFIG, replace(PLAIN, linear=linear))
    with torch.no_grad():
        for block, original in zip(changed.stack.blocks.values(), plain.stack.blocks.values(), strict=True):
            for name in ("q_proj", "v_proj"):
                getattr(block.attention, name).inner.weight.copy_(getattr(original.attention, name).weight)
                getattr(block.attention, name).up.zero_()
    assert torch.equal(plain(IDS), changed(IDS))
    changed(IDS).square().mean().backward()
    assert changed.stack.blocks["0"].attention.q_proj.up.grad.abs().max() > 0


class TwoExperts(nn.Module):
    """Chooses one of two feed-forward layers for each position: chapter 09 in little."""

    def __init__(self, config: ModelConfig, builders: Builders, layer: int):
        super().__init__()
        self.router = builders.linear("router", config.hidden_size, 2, False)
        self.experts = nn.ModuleList(build_feed_forward(config, builders, layer) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(dim=-1)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def test_a_mixture_of_experts_takes_the_place_of_the_feed_forward_layer():
    def feed_forward(config: ModelConfig, builders: Builders, layer: int) -> nn.Module:
        return TwoExperts(config, builders, layer) if layer == 1 else build_feed_forward(config, builders, layer)

    model = TransformerModel(CONFIG, replace(PLAIN, feed_forward=feed_forward))
    assert model(IDS).shape == (2, 19, 97)
    experts = parameters_by_role(model)["expert"]
    assert set(experts) == {
        f"stack.blocks.1.feed_forward.experts.{i}.{name}_proj.weight" for i in (0, 1) for name in ("gate", "up", "down")
    }
    first, second = (experts[f"stack.blocks.1.feed_forward.experts.{i}.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second) and first.std() > 0, "each expert has a stream of its own"


def test_a_block_runner_sees_every_block_and_may_run_it_its_own_way():
    seen = []

    def run(block: nn.Module, x: Tensor, context) -> Tensor:
        seen.append(x.shape)
        return torch.utils.checkpoint.checkpoint(block, x, context, use_reentrant=False)

    plain, recomputing = TransformerModel(CONFIG), TransformerModel(CONFIG, replace(PLAIN, run_block=run))
    for model in (plain, recomputing):
        next_token_objective(model, {"input_ids": IDS, "targets": IDS}).loss_sum.backward()
    assert seen[:3] == [(2, 19, 48)] * 3
    for (name, left), right in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad), name


def test_other_attention_norms_and_embeddings_can_be_built():
    class Scaled(Attention):
        def forward(self, x: Tensor, context) -> Tensor:
            return 0 * super().forward(x, context)

    built = []

    def norm(config: ModelConfig, size: int) -> nn.Module:
        built.append(size)
        return build_norm(config, size)

    def embedding(name: str, count: int, size: int) -> nn.Module:
        built.append(name)
        return nn.Embedding(count, size)

    model = TransformerModel(CONFIG, replace(PLAIN, attention=Scaled, norm=norm, embedding=embedding))
    assert built.count(48) == 7 and built.count("tokens") == 1
    changed = IDS.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 97
    with torch.no_grad():
        assert torch.equal(model(IDS)[:, 1:], model(changed)[:, 1:]), "without attention no position sees another"


def test_a_narrower_attention_reads_its_heads_off_its_projections():
    """Tensor parallelism gives each rank a part of the heads: half of them in each of two models, and the sum is the whole."""
    whole = TransformerModel(CONFIG).double().eval()
    parts = []
    for rank in (0, 1):
        part = TransformerModel(CONFIG).double().eval()
        for block in part.stack.blocks.values():
            attention = block.attention
            for name in ("q_proj", "k_proj", "v_proj"):
                layer = getattr(attention, name)
                layer.weight = nn.Parameter(layer.weight.chunk(2, dim=0)[rank].clone())
            attention.o_proj.weight = nn.Parameter(attention.o_proj.weight.chunk(2, dim=1)[rank].clone())
        parts.append(part)
    x = torch.randn(2, 19, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(19)
    context = whole.stack.context(positions, positions, 19)
    outs = [part.stack.blocks["0"].attention(x, context) for part in parts]
    torch.testing.assert_close(outs[0] + outs[1], whole.stack.blocks["0"].attention(x, context), rtol=0, atol=1e-12)


class GrowingCache(KeyValueCache):
    """Keeps keys and values of every layer: chapter 12 in little."""

    def __init__(self) -> None:
        self.length, self.kept = 0, {}

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.kept:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self.kept[layer], (keys, values), strict=True))
        self.kept[layer] = (keys, values)
        return keys, values


@by_family
@pytest.mark.parametrize("cuts", [(1,) * 19, (7, 1, 11), (18, 1)])
def test_a_cache_gives_the_logits_of_the_whole_sequence(config, cuts):
    model = TransformerModel(config).double().eval()
    cache, found = GrowingCache(), []
    with torch.no_grad():
        for piece in IDS.split(cuts, dim=1):
            found.append(model(piece, cache=cache))
            cache.length += piece.shape[1]
        torch.testing.assert_close(torch.cat(found, dim=1), model(IDS), rtol=0, atol=1e-12)
    assert cache.kept[0][0].shape == (2, 2, 19, 8)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_one_after_another_are_the_whole_model(tied):
    config = replace(CONFIG, tie_word_embeddings=tied)
    whole = TransformerModel(config, seed=5).eval()
    stages = []
    for blocks, first, last in ((range(1), True, False), (range(1, 3), False, True)):
        with torch.device("meta"):
            stage = keep_part(TransformerModel(config), blocks, embedding=first, head=last)
        materialize(stage, "cpu", seed=5)
        stages.append(stage.eval())
    assert stages[0].head is None and stages[1].embedding is None and list(stages[1].stack.blocks) == ["1", "2"]
    stream = stages[0](IDS)
    assert stream.shape == (2, 19, 48)
    assert torch.equal(stages[1](stream), whole(IDS))


def test_cutting_refuses_blocks_that_are_not_there_and_models_that_share_more():
    with pytest.raises(ValueError, match=r"no blocks \[3\]"):
        keep_part(TransformerModel(CONFIG), range(2, 4), embedding=False, head=True)
    with pytest.raises(ValueError, match="cannot be cut"):
        keep_part(TransformerModel(FAMILIES["relative"]), range(1), embedding=True, head=False)


def test_a_mask_of_someone_elses_joins_the_others():
    class EvenKeys(Mask):
        def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
            return (keys % 2 == 0).expand(len(queries), -1)

    model = TransformerModel(CONFIG).eval()
    changed = IDS.clone()
    changed[:, 1] = (changed[:, 1] + 1) % 97
    with torch.no_grad():
        before, after = (model(ids, mask=EvenKeys() & Documents(torch.zeros_like(IDS))) for ids in (IDS, changed))
    assert torch.equal(before[:, 2:], after[:, 2:]) and not torch.equal(before[:, 1], after[:, 1])


def test_no_path_ignores_a_mask():
    """The kernel's causal flag counts from the first key, which is wrong behind a cache; the written-out path does not know it."""
    queries, keys = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="as many queries as keys, not 3 and 5"):
        sdpa_attention(queries, keys, keys, AttentionMask(causal=True), 0.3, 0.0)
    with pytest.raises(ValueError, match="no causal flag"):
        eager_attention(queries, queries, queries, AttentionMask(causal=True), 0.3, 0.0)
    with pytest.raises(ValueError, match="set dropout to 0"):
        eager_attention(queries, queries, queries, AttentionMask(), 0.3, 0.1)


def test_a_head_fn_is_called_in_place_of_the_head():
    model = TransformerModel(CONFIG).eval()
    last = model(IDS, head_fn=lambda head, hidden_states: head(hidden_states[:, -1]))
    torch.testing.assert_close(last, model(IDS)[:, -1])


def test_chapter_01s_loop_and_another_optimizer_by_role():
    model = TransformerModel(CONFIG)
    roles = parameters_by_role(model)
    groups = [
        {"params": list(roles[role].values()), "weight_decay": decay}
        for role, decay in (("matrix", 0.1), ("embedding", 0.1), ("norm", 0.0))
    ]
    batch = {"input_ids": IDS[:, :-1], "targets": IDS[:, 1:]}
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    losses = [totals.mean_loss for _, totals in train(model, optimizer, [[batch]] * 20, next_token_objective, steps=20)]
    assert losses[-1] < losses[0] / 2
