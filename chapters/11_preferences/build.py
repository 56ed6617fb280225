"""The build of chapter 11: DPO from text to step, yours from an empty file. About four hours.

    course check 11.build                all stages; course check 11.build.read: one
    course hint 11.build.read            three hints for each stage
    course reset 11.build                this file as it was; your text is kept

You design the rest: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay thin:
a few lines each that call what you wrote. Each stage has functions of its own, and is NOT ATTEMPTED while one of them still raises
NotImplementedError, so you can work from the first stage to the last and stop after any of them.

You may use everything of chapters 01 to 10. You need nothing of this chapter's exercises, and may copy from them. The modules of
`shared.preference` may not be imported, nor may `trl` and `transformers`. Everything is on the CPU. The checks run in float64 unless a
stage says otherwise, and compare with each answer alone in a row, to 1e-9.

A model is any causal nn.Module that is called with tensors [rows, columns] of int64 and returns logits [rows, columns, vocabulary]:
    model(input_ids)                             each row is one sequence, whose positions count from 0
    model(input_ids, documents, positions)       a token sees those before it in its row that have the same number in `documents`
The logits at a place predict the token after it. Nothing else is known of a model: it may be an attention or a recurrence, may have
dropout, and may have no room for positions of `width` and above.

A pair is a dictionary: "prompt", a list of messages {"role": ..., "content": ...}; "chosen" and "rejected", the two answers as texts.
An example is (ids, trained): a sequence's token ids, and for each whether it is trained. A pair becomes two examples, chosen and rejected.
`width` is how many tokens of a sequence can be predicted, so an example has at most width + 1 ids.
Tensors [pairs, 2] have a row for each pair, in the order in which the pairs were given: chosen, rejected.

Settings are a dictionary with these four keys. With the log-probability p of an answer under the model, q under the reference, n trained
tokens, and c and r for chosen and rejected, the loss of a pair is
    loss             "sigmoid"   DPO: -(1 - e) log sigmoid(d) - e log sigmoid(-d)      with d = beta ((p_c - q_c) - (p_r - q_r))
                     "hinge"     max(0, 1 - d)
                     "ipo"       ((p_c - q_c) / n_c - (p_r - q_r) / n_r - 1 / (2 beta))^2      averages, as TRL has it; the paper has sums
                     "simpo"     -log sigmoid(beta (p_c / n_c - p_r / n_r) - gamma)
                     "orpo"      -p_c / n_c - beta log sigmoid(o_c - o_r)      with o = log(P / (1 - P)) and P = exp(p / n)
    beta             a number above 0
    label_smoothing  e, at least 0 and below 0.5; other losses than "sigmoid" have 0
    gamma            a number of at least 0; other losses than "simpo" have 0
"simpo" and "orpo" have no reference: where one is given, it is None.

The stages
    1 read       preference pairs from JSONL: text or messages, with a prompt or without. What cannot be used is named by line and reason
    2 encode     the ids of an answer behind its prompt, by a template, and which are trained: the answer and its end, never the prompt
    3 rows       pairs as rows for a model, padded or packed, as you like: no answer sees another, or what fills the row
    4 log_probs  the log-probability of each answer, summed over its trained tokens, and its gradient
    5 reference  the same of a model that is not trained: in evaluation mode, without a graph, some pairs at a time
    6 loss       DPO with label smoothing
    7 relatives  IPO, hinge, SimPO and ORPO, by name
    8 step       a step over micro-batches of any sizes that equals one over all pairs at once, by any optimizer of PyTorch
    9 metrics    loss, accuracy, rewards and margin over all pairs, whatever the micro-batches
    10 train     many steps: every pair once in an epoch, the reference scored once. The model learns to prefer held-out answers
    11 resume    a run that is saved and continued has the weights of one that was not, bit for bit
    12 budgets   what the steps above may hold and call (see `micro_batches`)
    13 bad_input what cannot be right is refused with a ValueError that says what; model and optimizer stay as they were
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Pair = dict[str, Any]
Example = tuple[list[int], list[bool]]
Examples = Sequence[tuple[Example, Example]]  # of pairs: chosen, rejected
Settings = dict[str, Any]


def split_pair(record: dict[str, Any]) -> Pair:
    """A record as a pair. It has "chosen" and "rejected", mostly a "prompt", and other keys that do not matter.

    With a prompt: it is a list of messages, or a text, which is one message of the user. Each answer is a text, or a list of one message
    of the assistant.
    Without (the prompt is missing or None), each of the two is a list of messages, a whole conversation. They differ in their last message
    alone, which is the assistant's; those before it are the prompt.
    Messages have a role, "system", "user" or "assistant", and a text as content; their other keys are left out.

    Raises:
        ValueError: "chosen" or "rejected" is missing, or one of the three is not as above; the prompt has no message, its last one is not
            the user's, or it is not the same in both conversations; an answer is empty or nothing but space; both answers are the same.
            The message has the key at fault: chosen, rejected or prompt (for equal answers: rejected).
    """
    raise NotImplementedError("11.build: split_pair is not written yet")


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a JSONL file in UTF-8: a record in each line, in order. Lines of nothing but space are left out, and counted.

    Raises:
        ValueError: a line is no JSON, no dictionary, or no pair: the file's name, "line " and its number from 1, and the reason. Or the
            file has no pair: its name.
    """
    raise NotImplementedError("11.build: read_pairs is not written yet")


def encode(pair: Pair, tokenize: Callable[[str], list[int]], marks: dict[str, int], width: int) -> tuple[Example, Example]:
    """Both answers as examples.

    The template: each message is marks[role], the ids of its content, marks["end"]; so is the answer, behind the whole prompt, as a message
    of the assistant. The answer's ids and its end are trained. What is more than width + 1 ids is cut off at the end.

    Args:
        tokenize: ids of a text, which never has a mark among them.
        marks: ids for "system", "user", "assistant" and "end".

    Raises:
        ValueError: nothing is left of an answer, or both are the same after the cut (stage 13). The message has the width.
    """
    raise NotImplementedError("11.build: encode is not written yet")


def rows(examples: Examples, width: int) -> object:
    """A batch of pairs for a model, whatever you make it. Inputs of the model have at most `width` columns.

    Raises:
        ValueError: an example has more than width + 1 ids (stage 13); the message has their number.
    """
    raise NotImplementedError("11.build: rows is not written yet")


def predictions(model: nn.Module, batch: object) -> list[tuple[Tensor, Tensor]]:
    """For each pair of a batch the logits [trained tokens, vocabulary] that predict the chosen and the rejected answer's trained tokens."""
    raise NotImplementedError("11.build: predictions is not written yet")


def log_probs(model: nn.Module, batch: object) -> Tensor:
    """The log-probabilities [pairs, 2] of a batch's answers, sums over their trained tokens, with a graph.

    They are computed in float32, or in float64 where the logits are. Logits that predict no trained token may be anything, also NaN and
    -inf: they reach neither the sums nor a gradient. The logits of a trained token's place may be -inf for other tokens.
    """
    raise NotImplementedError("11.build: log_probs is not written yet")


def score(model: nn.Module, examples: Examples, width: int, size: int) -> Tensor:
    """The log-probabilities [pairs, 2] of a model as a reference: in evaluation mode, without a graph, `size` pairs at a time (the last
    time as many as are left). Each module of the model has the mode that it had afterwards, also if the model raised. They may be used in
    a loss that has a graph."""
    raise NotImplementedError("11.build: score is not written yet")


def dpo(policy: Tensor, reference: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """The DPO loss [pairs] of log-probabilities [pairs, 2] under the model and the reference. Finite, with finite gradients, for
    differences of thousands. No gradient flows to the reference."""
    raise NotImplementedError("11.build: dpo is not written yet")


def losses(settings: Settings, policy: Tensor, reference: Tensor | None, tokens: Tensor) -> Tensor:
    """The loss [pairs] that `settings` name, as `dpo`. tokens: [pairs, 2] int64, trained tokens of each answer."""
    raise NotImplementedError("11.build: losses is not written yet")


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[Examples, Tensor | None]],
    width: int,
    settings: Settings,
) -> Tensor:
    """A step in training mode on the mean loss over the pairs of all micro-batches (examples, reference [pairs, 2]). The gradients stay
    after the step, until the next one.

    Returns:
        The mean loss, without a graph.

    Raises:
        ValueError: there are no pairs, or the loss is not finite (stage 13). The weights are then as they were.
    """
    raise NotImplementedError("11.build: step is not written yet")


def evaluate(
    model: nn.Module, micro_batches: Sequence[tuple[Examples, Tensor | None]], width: int, settings: Settings
) -> dict[str, float]:
    """Averages over the pairs of all micro-batches, in evaluation mode and without gradients; modes are restored as in `score`.

    An answer's reward is beta (p - q), for "simpo" and "orpo" beta p / n.

    Returns:
        "loss"; "chosen" and "rejected", the rewards; "margin", chosen less rejected; "accuracy", how often chosen is above rejected.
    """
    raise NotImplementedError("11.build: evaluate is not written yet")


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    width: int,
    settings: Settings,
    batch_size: int,
    micro_size: int,
    seed: int,
) -> object:
    """A run, whatever you make it. The reference is the model as it is now, scored once, micro_size pairs at a time, and not at all where
    the loss has none.

    batch_size pairs make a step, in micro-batches of micro_size; the last batch of an epoch, and the last micro-batch of a batch, have
    those that are left. Each epoch has all pairs once, in an order that follows from the seed and the epoch alone.

    Raises:
        ValueError: see `check_settings`; there are no pairs; batch_size or micro_size is below 1 (stage 13). The model is not called.
    """
    raise NotImplementedError("11.build: start is not written yet")


def advance(run: object, steps: int) -> list[float]:
    """The next steps of a run: the loss of each."""
    raise NotImplementedError("11.build: advance is not written yet")


def save(run: object, folder: Path) -> None:
    """Save a run between two steps, in files of your own. The folder need not exist. The run can be continued afterwards as well."""
    raise NotImplementedError("11.build: save is not written yet")


def resume(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Examples,
    width: int,
    settings: Settings,
    batch_size: int,
    micro_size: int,
    seed: int,
    folder: Path,
) -> object:
    """A run from its folder, with what `start` was given. `model` may have any weights, and `optimizer` is new. Dropout draws from
    PyTorch's global generator, and continues as it would have. The model is not called.

    Raises:
        ValueError: the folder has no run (its path), or one with other examples or other settings (stage 13).
    """
    raise NotImplementedError("11.build: resume is not written yet")


def micro_batches(examples: Examples, width: int, tokens: int) -> list[list[int]]:
    """Numbers of pairs from 0, each once, in groups such that the model's input for `rows` of each group has at most `tokens` numbers.
    Pairs of equal lengths make as few groups as can be. No model is called.

    The other budgets. A batch costs one call of the model, and its input has at most as many numbers as if all sequences were filled up to
    the longest, or to full rows of `width`. `log_probs` keeps nothing of the size of the logits for the backward pass but them, and at no
    time of the forward pass makes more than four rows of logits next to them, [width, vocabulary] each. A step has one micro-batch's graph
    at a time, and leaves nothing but gradients and the optimizer's state. A run holds no second model, and its reference costs one pass
    over the pairs in all.

    Raises:
        ValueError: a pair alone has more; the message has its number (stage 13).
    """
    raise NotImplementedError("11.build: micro_batches is not written yet")


def check_settings(settings: Settings) -> None:
    """Refuse settings that cannot be right.

    Raises:
        ValueError: a key is unknown or missing, or a value is not what the text above asks of it: the key, and the value if there is one.
            Numbers are ints or floats; a bool, NaN and infinity are none.
    """
    raise NotImplementedError("11.build: check_settings is not written yet")
