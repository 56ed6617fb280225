"""Attention document by document in packed rows: the numbers and gradients of the mask, and the mask wherever it serves better."""

import pytest
import torch

from shared.model import masks
from shared.model.attention import eager_attention, sdpa_attention
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.document_attention import pack_of
from shared.model.masks import AttentionMask, Causal, Documents, Full, Padding, Prefix, Window, to_attention_mask
from shared.model.transformer import TransformerModel
from shared.optim.precision import autocast_objective
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing

SEQ = 512
PACKED = {
    "several": [[200, 112, 100, 100], [5, 507]],
    "of one token": [[1, 1, 509, 1], [1, 511]],
    "one in a row": [[512], [512]],
    "one in one row": [[512], [40, 472]],
    "padding behind": [[300, 100, -112], [512]],
}
RULES = {
    "causal": Causal(),
    "both sides": Full(),
    "window": Causal() & Window(64),
    "window of one": Causal() & Window(1),
    "wide window": Causal() & Window(600),
}


def ids_of(rows: list[list[int]]) -> torch.Tensor:
    """[rows, seq] int64: documents of these lengths; a negative one is padding."""
    numbers = [[n if size > 0 else -1 for n, size in enumerate(row)] for row in rows]
    return torch.stack([torch.tensor(n).repeat_interleave(torch.tensor(row).abs()) for n, row in zip(numbers, rows, strict=True)])


def mixed(attend, rule, heads: int, shared: int, sdpa: bool) -> list[torch.Tensor]:
    """The result in float64 and every gradient."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, n, SEQ, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (heads, shared, shared)]
    positions = torch.arange(SEQ)
    out = attend(*leaves, to_attention_mask(rule, positions, positions, sdpa=sdpa, documents=True), 0.5, 0.0)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator, dtype=torch.float64))]


@pytest.mark.parametrize("heads, shared", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packed", PACKED)
def test_documents_by_themselves_give_the_numbers_of_the_mask(packed, rule, heads, shared, monkeypatch):
    monkeypatch.setattr(masks, "saves_work", lambda lengths, rows, seq: True)
    rule = RULES[rule] & Documents(ids_of(PACKED[packed]))
    positions = torch.arange(SEQ)
    assert to_attention_mask(rule, positions, positions, documents=True).allowed is None
    found, expected = mixed(sdpa_attention, rule, heads, shared, True), mixed(eager_attention, rule, heads, shared, False)
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-12)


def test_dropout_reaches_each_document():
    positions = torch.arange(SEQ)
    mask = to_attention_mask(Causal() & Documents(ids_of(PACKED[next(iter(PACKED))])), positions, positions, documents=True)
    ones = torch.ones(2, 1, SEQ, 4)
    assert mask.documents is not None and not sdpa_attention(ones, ones, ones, mask, 0.5, 1.0).any()


def test_a_row_that_is_one_document_takes_the_causal_flag():
    positions = torch.arange(SEQ)
    assert to_attention_mask(Causal() & Documents(ids_of([[SEQ]])), positions, positions, documents=True) == AttentionMask(causal=True)


@pytest.mark.parametrize(
    "rule",
    [
        Causal() & Documents(ids_of([[256, 256]])) & Padding(torch.arange(SEQ)[None] < 500),
        (Causal() | Prefix(3)) & Documents(ids_of([[256, 256]])),
        Documents(ids_of([[256, 256]])) & Window(9),
        Causal() & Documents((torch.arange(SEQ)[None] // 128) % 2),  # in pieces
        Causal() & Documents(torch.arange(SEQ)[None]),  # a call for each position would cost more
        Causal() & Documents(ids_of([[3, 509]])),  # next to nothing would be saved
    ],
)
def test_other_rules_and_documents_in_pieces_keep_the_mask(rule):
    positions = torch.arange(SEQ)
    found = to_attention_mask(rule, positions, positions, documents=True)
    assert found.documents is None
    assert torch.equal(found.allowed[:, 0], rule.allowed(positions[:, None], positions[None]))


def test_short_rows_biases_and_a_cache_keep_the_mask():
    short, long = torch.arange(256), torch.arange(SEQ)
    assert to_attention_mask(Causal() & Documents(ids_of([[128, 128]])), short, short, documents=True).allowed is not None
    rule = Causal() & Documents(ids_of([[256, 256]]))
    assert to_attention_mask(rule, long, long, documents=True).documents is not None
    assert to_attention_mask(rule, long, long).allowed is not None
    assert to_attention_mask(rule, long, long, torch.zeros(1, 1, SEQ, SEQ), documents=True).bias is not None
    assert to_attention_mask(rule, long, long, in_order=False, documents=True).allowed is not None
    assert to_attention_mask(rule, long[-1:], long, documents=True).allowed is not None


def test_one_row_of_documents_stands_for_all_rows():
    rule = Causal() & Documents(ids_of([[200, 312]]))
    found, expected = mixed(sdpa_attention, rule, 2, 2, True), mixed(eager_attention, rule, 2, 2, False)
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-12)


def test_lengths_and_starts_are_those_of_the_rows():
    packed = pack_of(ids_of([[200, 300, -12], [512]]), torch.device("cpu"))
    assert packed.lengths == [200, 300, 12, 512] and packed.rows == 2 and packed.longest == 512
    assert pack_of(ids_of([[200, 200, -112]]), torch.device("cpu")).longest == 256
    assert packed.starts.tolist() == [0, 200, 500, 512, 1024] and packed.starts.dtype == torch.int32


SIZES = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
VARIANTS = {
    "llama": {"num_key_value_heads": 2},
    "window": {"sliding_window": 48, "layer_types": ("sliding_attention", "full_attention")},
    "alibi": {"position": "alibi"},
    "norm of heads": {"qk_norm": True},
    "encoder": {"architecture": "encoder"},
}


def packed_batch() -> dict[str, torch.Tensor]:
    documents = ids_of(PACKED["several"])
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = torch.arange(SEQ).expand(2, SEQ)
    ids = torch.randint(11, (2, SEQ + 1), generator=torch.Generator().manual_seed(0))
    positions = places - torch.where(first, places, 0).cummax(dim=1).values
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "documents": documents, "positions": positions}


def trained(config: dict, precision: str, how: str, batch: dict) -> list[torch.Tensor]:
    """The loss and every gradient of a model."""
    model = TransformerModel(ModelConfig(**SIZES, **config, max_position_embeddings=SEQ), seed=1)
    model = model.double() if precision == "float32" else model
    apply_activation_checkpointing(model, how)
    totals = autocast_objective(packed_next_token_objective, precision)(model, batch)
    totals.loss_sum.backward()
    return [totals.loss_sum.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    "precision, near, how",
    [("float32", 1e-9, "none"), ("float32", 1e-9, "full"), ("float32", 1e-9, "selective"), ("bfloat16", 0.03, "none")],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_has_the_loss_and_gradients_of_attention_written_out(variant, precision, near, how):
    batch = packed_batch()
    wanted = trained(VARIANTS[variant] | {"attention": "eager"}, precision, "none", batch)
    found = trained(VARIANTS[variant], precision, how, batch)
    for each, expected in zip(found, wanted, strict=True):
        assert (each - expected).norm() <= near * expected.norm() + 1e-12


def test_a_stack_counts_which_kernels_its_passes_took():
    model, batch = TransformerModel(ModelConfig(**SIZES, **VARIANTS["window"], max_position_embeddings=SEQ)), packed_batch()
    packed_next_token_objective(model, batch)
    packed_next_token_objective(model, {name: tensor[:, :100] for name, tensor in batch.items()})
    model(batch["input_ids"])
    assert model.stack.attended == {"document by document": 2, "mask": 3, "causal flag": 1}


def test_a_compiled_model_keeps_the_mask_and_its_one_graph():
    model = TransformerModel(ModelConfig(**SIZES, max_position_embeddings=SEQ)).eval()
    input_ids, graphs = torch.arange(2 * SEQ).view(2, SEQ) % 11, []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counted, fullgraph=True)
    for packed in ("several", "padding behind"):
        documents = Documents(ids_of(PACKED[packed]))
        with torch.no_grad():
            torch.testing.assert_close(compiled(input_ids, mask=documents), model(input_ids, mask=documents))
    assert len(graphs) == 1
