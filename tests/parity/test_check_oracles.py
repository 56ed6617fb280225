"""Expected values of three checks are computed in plain Python, so that a learner need not install transformers. Here they equal its own,
on the arguments of every case that uses them."""

from types import SimpleNamespace
from unittest import mock

import torch
from transformers import DataCollatorForLanguageModeling
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from shared.course.catalogue import all_exercises
from shared.course.running import read_check


def cases_of(exercise: str, *functions: str):
    """(title, arguments, what the check expects) of each case whose expected values come from one of these functions of its file."""
    check = read_check(all_exercises()[exercise])
    return [(case.title, case.given(), case.expected) for case in check.cases if case.expected.__name__ in functions]


def warped(logits, temperature=1.0, top_k=None, top_p=None):
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    warpers += ([TopKLogitsWarper(top_k)] if top_k else []) + ([TopPLogitsWarper(top_p)] if top_p else [])
    scores = logits.double()
    for warper in warpers:
        scores = warper(None, scores)
    return scores


def test_shares_of_sample_next():
    found = cases_of("01.sample_next", "probabilities")
    assert len(found) == 7
    for title, given, expected in found:
        of_check = [value for name, value in expected(**given).items() if name.startswith("share")]
        options = {name: value for name, value in given.items() if name in ("temperature", "top_k")}
        theirs = warped(given["logits"][: len(of_check)], **options).softmax(-1).float()
        torch.testing.assert_close(torch.stack(of_check), theirs, rtol=1e-6, atol=0, msg=lambda said, title=title: f"{title}: {said}")


def test_tokens_of_draw_tokens():
    """Cases with a temperature of 0 are not among them. A place that the two walks would reach at different tokens is none of these."""
    found = cases_of("12.draw_tokens", "by_exponentials")
    assert len(found) > 20
    for title, given, expected in found:
        mine, places = expected(**given), given["uniform"].double()
        options = {name: value for name, value in given.items() if name not in ("logits", "uniform")}
        logs = warped(given["logits"], **options).log_softmax(-1)
        tokens = torch.tensor([drawn(row, place) for row, place in zip(logs.exp().tolist(), places.tolist(), strict=True)])
        assert torch.equal(mine["tokens"], tokens), title
        log_probs = logs[torch.arange(len(tokens)), tokens]
        torch.testing.assert_close(mine["log_probs"], log_probs, rtol=1e-12, atol=1e-12, msg=lambda said, title=title: f"{title}: {said}")


def drawn(row, place):
    """The first token up to which more than `place` has passed."""
    passed, token = row[0], 0
    while passed <= place:
        token, passed = token + 1, passed + row[token + 1]
    return token


def test_shares_of_draw_tokens():
    [(title, given, expected)] = cases_of("12.draw_tokens", "shares_by_exponentials")
    options = {name: value for name, value in given.items() if name not in ("logits", "count")}
    theirs = warped(given["logits"], **options)[0].softmax(-1)
    torch.testing.assert_close(expected(**given)["share of each token"], theirs, rtol=1e-6, atol=0)


class Vocabulary:
    """What the collator asks of a tokenizer."""

    mask_token = "[MASK]"

    def __init__(self, mask_id):
        self.mask_id = mask_id

    def __len__(self) -> int:
        return 97

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.mask_id


def collated(input_ids, special, selection, fate, replacements, mask_id, rate=0.15):
    """The collator's own code, with these draws in place of its own. Its second and third draw are "mask token?" and, for the others,
    "random token?": 0.1 of the remaining 0.2."""
    collator = SimpleNamespace(mlm_probability=rate, mask_replace_prob=0.8, random_replace_prob=0.1, whole_word_mask=False, generator=None)
    collator.tokenizer = Vocabulary(mask_id)
    draws = iter([lambda chances: selection < chances, lambda chances: fate < 0.8, lambda chances: fate < 0.9])
    with (
        mock.patch("torch.bernoulli", lambda chances, generator=None: next(draws)(chances).float()),
        mock.patch("torch.randint", lambda *arguments, **options: replacements),
    ):
        return DataCollatorForLanguageModeling.torch_mask_tokens(collator, input_ids.clone(), special)


def test_masks_of_mask_tokens():
    found = cases_of("03.mask_tokens", "by_the_rule")
    assert len(found) == 4
    for title, given, expected in found:
        mine, (inputs, targets) = expected(**given), collated(**given)
        assert torch.equal(mine["inputs"], inputs) and torch.equal(mine["targets"], targets), title


