"""Expected values of six checks are computed in plain Python, so that a learner need not install transformers. Here they equal its own,
on the arguments of every case that uses them."""

from types import SimpleNamespace
from unittest import mock

import torch
from transformers import DataCollatorForLanguageModeling
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_loss
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.switch_transformers.modeling_switch_transformers import load_balancing_loss_func as switch_loss
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

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
    assert len(found) == 8
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


ROUTERS = {each.__name__: each for each in (MixtralTopKRouter, OlmoeTopKRouter, DeepseekV3TopkRouter)}


def test_weights_of_top_k_routing():
    """A router's matrix is the identity, so that it routes by the given logits."""
    found = cases_of("09.top_k_routing", "gates_one_by_one")
    assert [title for title, _, _ in found] == list(ROUTERS)
    for title, given, expected in found:
        config = SimpleNamespace(num_experts_per_tok=given["k"], norm_topk_prob=given["normalize"], routed_scaling_factor=given["scaling"])
        config.n_group, config.topk_group = given["groups"], given["best_groups"]
        size = config.hidden_size = config.num_experts = config.num_local_experts = config.n_routed_experts = given["logits"].shape[-1]
        router, logits = ROUTERS[title](config), given["logits"].clone().requires_grad_()
        router.weight.data = torch.eye(size)
        if given["bias"] is not None:
            router.e_score_correction_bias.copy_(given["bias"])
        _, weights, experts = router(logits)
        by_expert = weights.new_zeros(len(logits), size).scatter(-1, experts, weights)
        mine = expected(**given)
        torch.testing.assert_close(mine["weights by expert"], by_expert, rtol=1e-5, atol=1e-7)
        assert_same_gradient(mine["gradient of logits"], by_expert, logits)


def assert_same_gradient(mine, output, leaf):
    """`mine` is of the random flow that the checks of chapter 09 use."""
    flow = torch.randn(output.shape, generator=torch.Generator().manual_seed(17), dtype=torch.float64).to(output.dtype)
    [theirs] = torch.autograd.grad(output, [leaf], flow)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_losses_of_balance_loss():
    """Switch's takes its shares row by row; Mixtral's is given one row at a time. Both count in float32."""
    [switch, mixtral] = cases_of("09.balance_loss", "by_hand_of_logits")
    _, given, expected = switch
    logits, size = given["logits"].clone().requires_grad_(), given["logits"].shape[-1]
    probabilities = logits.softmax(-1)
    assert given["k"] == 1 and given["valid"].all()
    of_switch = switch_loss(probabilities, probabilities.topk(1).indices) * given["valid"].sum() / size
    torch.testing.assert_close(expected(**given)["loss"], of_switch, rtol=1e-6, atol=0)
    assert_same_gradient(expected(**given)["gradient of logits"], of_switch, logits)
    _, given, expected = mixtral
    logits, size, valid = given["logits"].clone().requires_grad_(), given["logits"].shape[-1], given["valid"]
    rows = [(row, mask) for row, mask in zip(logits, valid, strict=True) if mask.any()]
    of_mixtral = sum(mixtral_loss((row,), size, given["k"], mask.long()) * mask.sum() / size for row, mask in rows).double()
    torch.testing.assert_close(expected(**given)["loss"], of_mixtral, rtol=1e-6, atol=0)
    assert_same_gradient(expected(**given)["gradient of logits"], of_mixtral, logits)


def test_losses_of_z_loss():
    found = [each for each in cases_of("09.z_loss", "by_hand") if each[0].startswith("52 tokens")]
    assert len(found) == 2
    for title, given, expected in found:
        logits = given["logits"].clone().requires_grad_()
        theirs = router_z_loss_func(logits) * given["valid"].sum()
        torch.testing.assert_close(expected(**given)["loss"], theirs, rtol=1e-5, atol=0, msg=lambda said, title=title: f"{title}: {said}")
        assert_same_gradient(expected(**given)["gradient of logits"], theirs, logits)
