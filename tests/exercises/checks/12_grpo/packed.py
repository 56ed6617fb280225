"""Arguments of 12.grpo_policy_loss: packed rows in which several answers stand, a prompt before each, and padding behind the last."""

import torch

from .common import randn

NAMES = "log_probs", "old_log_probs", "advantages"


def of(ratios, advantages, answers, dtype=torch.float64, old=-1.0, **more):
    """One row of tokens whose probability was e^-1, and is now this many times as large."""

    def given():
        wanted = torch.tensor([ratios], dtype=torch.float64)
        made = wanted.log() + old, torch.full_like(wanted, old), torch.tensor([advantages], dtype=torch.float64)
        return {name: tensor.to(dtype) for name, tensor in zip(NAMES, made, strict=True)} | {"answers": torch.tensor([answers])} | more

    return given


def drawn(lengths, prompt=1, seq=None, outside=(7.0, -5.0, 3.0), spread=0.5, scale=1.0, dtype=torch.float64, seed=1, **more):
    """Rows of answers of these lengths (0: a number without tokens), a prompt before each, padding at the end. Ratios lie on both sides of
    both edges; at tokens of no answer stand numbers that are large."""

    def given():
        width = max([seq or 0, *(sum(row) + prompt * len(row) for row in lengths)])
        answers = torch.full((len(lengths), width), -1)
        for row, own in enumerate(lengths):
            for number, length in enumerate(own):
                start = sum(own[:number]) + prompt * (number + 1)
                answers[row, start : start + length] = number
        old = -randn(*answers.shape, seed=seed).abs()
        made = old + spread * randn(*answers.shape, seed=seed + 1), old, scale * randn(*answers.shape, seed=seed + 2)
        made = [tensor.where(answers >= 0, left).to(dtype) for tensor, left in zip(made, outside, strict=True)]
        return dict(zip(NAMES, made, strict=True)) | {"answers": answers} | more

    return given


def changed(given, *changes):
    """(name, row, column, number): what stands at some places instead."""

    def made():
        arguments = given()
        for name, row, column, number in changes:
            arguments[name][row, column] = number
        return arguments

    return made


def same_tensor(given):
    def made():
        arguments = given()
        del arguments["old_log_probs"]
        return arguments

    return made


def far_apart():
    return {"log_probs": torch.tensor([[-1.0, -1.0, -torch.inf, -800.0]]).double(),
            "old_log_probs": torch.tensor([[-91.0, -91.0, -1.0, -1.0]]).double(),
            "advantages": torch.tensor([[1.0, -1.0, 1.0, -1.0]]).double(), "answers": torch.tensor([[0, 0, 0, 1]])}  # fmt: skip


def mixed(dtype, others):
    """What was stored need not have the dtype of what is computed now."""

    def given():
        made = drawn([[17, 9], [20]])()
        cast = {name: made[name].to(dtype if name == "log_probs" else others) for name in NAMES}
        return made | cast | {"level": "sequence"}

    return given
