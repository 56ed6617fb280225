"""Documents that share a row do not know of each other, and each objective is torch's cross-entropy over what counts."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from shared.data.masking import Masking
from shared.data.objectives import encoder_decoder_objective, masked_language_objective
from shared.model.chunked_loss import apart, packed_next_token_objective
from shared.data.packing import pack_documents
from shared.data.spans import pair_batch
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.masks import Padding
from shared.model.transformer import TransformerModel

POSITIONS = ("rope", "alibi", "learned", "relative", "none")
SIZES = {"vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_of(**options) -> TransformerModel:
    """A model in float64 whose every parameter is random, biases and norms too."""
    model = TransformerModel(ModelConfig(**SIZES | {"max_position_embeddings": 64} | options)).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def documents(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(5, 53, (size,), generator=torch.Generator().manual_seed(size)) for size in sizes]


def batch_of(*rows: list[torch.Tensor], seq: int = 31) -> dict[str, torch.Tensor]:
    packed = [pack_documents(row, seq) for row in rows]
    return {name: torch.stack([row[name] for row in packed]) for name in packed[0]}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("position", POSITIONS)
def test_changing_one_document_leaves_the_others_logits(position, attention):
    first, second, third = documents(9, 7, 11)
    model = model_of(position=position, attention=attention)
    before, after = batch_of([first, second, third]), batch_of([first.flip(0), second, third])
    with torch.no_grad():
        logits = [model(batch["input_ids"], **apart(batch)) for batch in (before, after)]
    inside = before["documents"][0] == 0
    assert torch.equal(logits[0][0, ~inside], logits[1][0, ~inside])  # to the last bit: not a number of it depends on document 0
    assert not torch.allclose(logits[0][0, inside], logits[1][0, inside])


@pytest.mark.parametrize("position", POSITIONS)
def test_each_document_has_the_logits_that_it_has_alone(position):
    texts = documents(9, 7, 11)
    model, batch = model_of(position=position), batch_of(texts)
    with torch.no_grad():
        together = model(batch["input_ids"], **apart(batch))[0]
        for number, text in enumerate(texts):
            alone = model(text[None, :-1])[0]
            torch.testing.assert_close(together[batch["documents"][0] == number], alone, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("position", POSITIONS)
def test_positions_alone_do_not_keep_documents_apart(position):
    """The negative control: without the mask, and with everything else as it should be, documents leak."""
    first, second, third = documents(9, 7, 11)
    model = model_of(position=position)
    before, after = batch_of([first, second, third]), batch_of([first.flip(0), second, third])
    with torch.no_grad():
        logits = [model(batch["input_ids"], positions=batch["positions"]) for batch in (before, after)]
    others = before["documents"][0] == 1
    assert (logits[0][0, others] - logits[1][0, others]).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_the_mask_alone_does_not_set_positions_back(position):
    """RoPE tells differences only, so it does not need positions that restart; learned positions do."""
    model, batch = model_of(position=position), batch_of(documents(9, 7))
    with torch.no_grad():
        masked = model(batch["input_ids"], mask=apart(batch)["mask"])
        right = model(batch["input_ids"], **apart(batch))
    same = torch.allclose(masked[batch["documents"] >= 0], right[batch["documents"] >= 0], rtol=1e-5, atol=1e-7)  # tables are float32
    assert same == (position == "rope")


@pytest.mark.parametrize("position", POSITIONS)
def test_a_packed_batch_trains_like_its_documents_one_by_one(position):
    """Loss, count and every gradient: a mask that changed the forward pass only would be found here."""
    texts = documents(9, 7, 11)
    together, alone = model_of(position=position), model_of(position=position)
    totals = packed_next_token_objective(together, batch_of(texts[:2], texts[2:]))
    totals.loss_sum.backward()
    singles = [next_token_objective(alone, {"input_ids": text[None, :-1], "targets": text[None, 1:]}) for text in texts]
    sum(single.loss_sum for single in singles).backward()
    assert totals.token_count == sum(map(len, texts)) - len(texts) == sum(single.token_count for single in singles)
    assert totals.metrics["correct"] == sum(single.metrics["correct"] for single in singles)
    for (name, left), right in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-8, atol=1e-10, msg=name)


def test_padding_of_a_row_changes_nothing():
    texts, model = documents(9, 7), model_of()
    short, long = batch_of(texts, seq=14), batch_of(texts, seq=29)
    left, right = (packed_next_token_objective(model, batch) for batch in (short, long))
    torch.testing.assert_close(left.loss_sum, right.loss_sum, rtol=1e-12, atol=0)
    assert left.token_count == right.token_count


def test_a_batch_without_documents_is_plain_next_token_prediction():
    model, batch = model_of(), batch_of(documents(32))
    plain = {name: batch[name] for name in ("input_ids", "targets")}
    left, right = packed_next_token_objective(model, plain), next_token_objective(model, plain)
    torch.testing.assert_close(left.loss_sum, right.loss_sum, rtol=1e-12, atol=0)
    assert apart(plain) == {}


def encoder(**options) -> TransformerModel:
    return model_of(architecture="encoder", head="mlm", position="learned", **options)


def masked_batch(seed: int = 5) -> dict[str, torch.Tensor]:
    task = Masking(mask_id=3, special_ids=(0, 1, 2), vocab_size=53)
    return task(batch_of(documents(9, 7, 11), documents(13, 12)), torch.Generator().manual_seed(seed))


def test_masked_language_modelling_is_cross_entropy_of_the_hidden_tokens():
    batch, model, other = masked_batch(), encoder(), encoder()
    totals = masked_language_objective(model, batch)
    totals.loss_sum.backward()
    logits = other(batch["input_ids"], **apart(batch))
    expected = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    expected.backward()
    torch.testing.assert_close(totals.loss_sum, expected.detach(), rtol=1e-12, atol=0)
    assert totals.token_count == (batch["targets"] != -100).sum() > 0
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-9, atol=1e-11, msg=name)


def test_an_encoder_sees_both_sides_and_no_other_document():
    first, second = documents(9, 7)
    model = encoder()
    before, after = batch_of([first, second]), batch_of([first, second])
    after["input_ids"][0, 12] += 1  # inside of the second document
    with torch.no_grad():
        change = (model(before["input_ids"], **apart(before)) - model(after["input_ids"], **apart(after))).abs().amax(dim=-1)[0]
    of_second = before["documents"][0] == 1
    assert (change[of_second] > 0).all() and (change[before["documents"][0] == 0] == 0).all()


def test_a_row_in_which_nothing_was_chosen_costs_nothing():
    batch = masked_batch()
    batch["targets"] = torch.full_like(batch["targets"], -100)
    totals = masked_language_objective(encoder(), batch)
    assert totals.loss_sum == 0 and totals.token_count == 0


def encoder_decoder() -> TransformerModel:
    return model_of(architecture="encoder-decoder", position="relative", num_key_value_heads=4)


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    read, written = documents(9, 5, 12), documents(4, 8, 3)
    return list(zip(read, written, strict=True))


def test_pairs_in_a_batch_train_like_pairs_one_by_one():
    """Padding of either text reaches neither the loss nor a gradient."""
    together, alone = encoder_decoder(), encoder_decoder()
    totals = encoder_decoder_objective(together, pair_batch(pairs(), start_id=0))
    totals.loss_sum.backward()
    singles = [encoder_decoder_objective(alone, pair_batch([pair], start_id=0)) for pair in pairs()]
    sum(single.loss_sum for single in singles).backward()
    assert totals.token_count == 4 + 8 + 3
    torch.testing.assert_close(totals.loss_sum.detach(), sum(single.loss_sum.detach() for single in singles), rtol=1e-10, atol=0)
    for (name, left), right in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("left_out", ["encoder_mask", "cross_mask"])
def test_padding_that_is_not_masked_is_noticed(left_out):
    """The negative control of the test above: either mask matters."""
    model, batch = encoder_decoder(), pair_batch(pairs(), start_id=0)
    masks = dict.fromkeys(("encoder_mask", "cross_mask"), Padding(batch["valid"]))
    forward = partial(model, batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"])
    with torch.no_grad():
        assert not torch.allclose(forward(**masks), forward(**masks | {left_out: None}))


def test_a_pair_batch_by_hand():
    batch = pair_batch([(torch.tensor([5, 6, 1]), torch.tensor([7, 1])), (torch.tensor([8, 1]), torch.tensor([9, 4, 1]))], start_id=2)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [8, 1, 0]]
    assert batch["valid"].tolist() == [[True, True, True], [True, True, False]]
    assert batch["decoder_input_ids"].tolist() == [[2, 7, 0], [2, 9, 4]]
    assert batch["targets"].tolist() == [[7, 1, -100], [9, 4, 1]]


@pytest.mark.parametrize("wrong", [[], [(torch.tensor([], dtype=torch.int64), torch.tensor([1]))]])
def test_a_batch_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="at least one pair"):
        pair_batch(wrong, start_id=0)
