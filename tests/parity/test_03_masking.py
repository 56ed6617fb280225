"""Our masking beside transformers' collator: the same shares of the same tokens, from draws of each one's own."""

import torch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from shared.data.masking import Masking

ROWS, SEQ, VOCAB = 64, 256, 200
NAMES = {"pad_token": "<pad>", "cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<mask>"}


def tokenizer() -> PreTrainedTokenizerFast:
    """Four special tokens, ids 0 to 3, and words."""
    from tokenizers import Tokenizer, models

    words = [*NAMES.values(), *(f"w{number}" for number in range(VOCAB - len(NAMES)))]
    vocabulary = {word: place for place, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "<pad>")), **NAMES)


def rows() -> torch.Tensor:
    ids = torch.randint(4, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -20:] = 1, 0
    return ids


def shares(before: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """What became of how many of the ordinary tokens, and of the chosen ones."""
    chosen, ordinary = targets != -100, before >= 4
    masked, kept = inputs == 3, inputs == before
    assert not chosen[~ordinary].any()
    assert torch.equal(inputs[~chosen], before[~chosen]) and torch.equal(targets[chosen], before[chosen])
    counts = {"masked": masked & chosen, "kept": kept & chosen, "random": chosen & ~masked & ~kept}
    of_chosen = {name: (found.sum() / chosen.sum()).item() for name, found in counts.items()}
    return {"chosen": (chosen.sum() / ordinary.sum()).item()} | of_chosen


def of_theirs(**options) -> dict[str, float]:
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.15, seed=0, **options)
    found = collator([{"input_ids": row.tolist()} for row in rows()])
    return shares(rows(), found["input_ids"], found["labels"])


def of_ours() -> dict[str, float]:
    task = Masking(mask_id=3, special_ids=(0, 1, 2), vocab_size=VOCAB)
    found = task({"input_ids": rows()}, torch.Generator().manual_seed(1))
    return shares(rows(), found["input_ids"], found["targets"])


def far(left: dict[str, float], right: dict[str, float]) -> list[str]:
    """Shares that differ by more than five standard deviations: 0.4 % of 15,000 tokens, 1.2 % of 2,200 chosen ones, both drawn twice."""
    return [name for name in left if abs(left[name] - right[name]) > (0.02 if name == "chosen" else 0.06)]


def test_masking_shares_equal_the_transformers_collator():
    assert far(of_ours(), of_theirs()) == []


def test_other_shares_are_noticed():
    """The negative control: a collator that masks every chosen token."""
    assert set(far(of_ours(), of_theirs(mask_replace_prob=1.0, random_replace_prob=0.0))) == {"masked", "kept", "random"}
