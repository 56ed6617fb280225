"""The build of chapter 12: GRPO from generation to a reward that rises, yours from an empty file. About four hours.

    course check 12.build                all stages; course check 12.build.cache: one
    course hint 12.build.cache           three hints for each stage
    course reset 12.build                this file as it was; your text is kept

You design the rest: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay thin:
a few lines each that call what you wrote. Each stage has functions of its own, and is NOT ATTEMPTED while one of them still raises
NotImplementedError, so you can work from the first stage to the last and stop after any of them.

You may use everything of chapters 01 to 11. You need nothing of this chapter's exercises, and may copy from them. The modules of
`shared.rl` may not be imported, nor may `trl` and `transformers`. Everything is on the CPU. The checks run in float64 unless a stage says
otherwise, and compare with each answer alone, without a cache, to 1e-9.

A model is a causal transformer without dropout. It is called with int64 tensors [rows, columns] and returns logits [rows, columns,
vocabulary], of which those at a place predict the token after it:
    model(input_ids)                        each row is one sequence, whose positions count from 0
    model(input_ids, positions, attend)     the same, but at these positions, and with your attention in place of its own
In the second form each layer calls `attend(layer, queries, keys, values)` once. `layer` is the layer's name. Queries are
[rows, H, columns, d], keys and values [rows, K, columns, d], where H, K and d may be others in each layer and K divides H: query head h
looks at key-value head h // (H / K). The result is [rows, H, columns, d]; scores are divided by the square root of d. Positions are in
the queries and keys already. A model may have no positions beyond those that tokens have, not even for what fills up a row.

A prompt is a list of at least one token id. An answer is (ids, log_probs): what was drawn after a prompt, with the end token where it was
drawn, and the log-probability of each, two lists of equal lengths. An answer ends with the end token, or after `limit` tokens without one.
An experience is (prompt, ids, log_probs, advantage): an answer's prompt, the answer, and how much better than others it was.

Settings are a dictionary with these twelve keys. Numbers are ints or floats, above 0.
    end           the end token; an int of at least 0
    limit         most tokens of an answer; an int of at least 1
    temperature   a number
    prompts       prompts of a rollout; an int of at least 1
    group         answers to each prompt; an int of at least 2
    updates       steps of the optimizer for each rollout, each on all of its answers; an int of at least 1
    micro_size    answers of a micro-batch; an int of at least 1
    scale         "group" or "none": see `advantages`
    level         "token" or "sequence": see `token_losses`
    clip_low      a number below 1: how far a ratio may fall before nothing more is gained
    clip_high     a number: how far it may rise
    aggregation   "token", "sequence" or "constant": see `token_weights`

The stages
    1 cache       a KV cache, filled with prompts of several lengths, then token by token: the logits of a model without a cache
    2 greedy      whole answers in one batch; a row that is finished leaves it
    3 draw        a token at a temperature and with top-p, and its log-probability under what it was drawn from
    4 sample      whole answers, each with a seed of its own, so that neighbours do not change it
    5 refill      a fixed number of rows: a waiting prompt takes the place of a finished answer. Budgets of calls and bytes
    6 score       the log-probabilities of answers by a training pass, equal to those recorded while they were drawn
    7 reward      a verifier that no answer outwits
    8 advantages  rewards against the group's mean
    9 loss        the clipped loss of each token, and how much a token counts
    10 update     a step of the optimizer, the same for all sizes of micro-batches; its loss may be 0, its gradient not
    11 train      rollouts and updates: every prompt in turn, old log-probabilities fixed. The reward of prompts never seen rises
    12 resume     a run that is saved in the middle of a rollout and continued has the weights of one that was not, bit for bit
    13 bad_input  what cannot be right is refused with a ValueError that says what; model and optimizer stay as they were
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Answer = tuple[list[int], list[float]]
Experience = tuple[list[int], list[int], list[float], float]
Settings = dict[str, Any]


def prefill(model: nn.Module, prompts: Sequence[list[int]], places: int) -> tuple[object, Tensor]:
    """A KV cache, whatever you make it, of `places` places for each prompt. It holds the prompts. One call of the model, without gradients.

    Returns:
        The cache, and the logits [prompts, vocabulary] that predict the first token after each prompt.

    Raises:
        ValueError: a prompt is empty, or has more tokens than places (stage 13): the least or most tokens.
    """
    raise NotImplementedError("12.build: prefill is not written yet")


def append(model: nn.Module, cache: object, tokens: Tensor) -> Tensor:
    """Another token for each row of the cache, which takes it in. One call of the model, whose input has one column, without gradients.

    Args:
        tokens: [rows] int64.

    Returns:
        The logits [rows, vocabulary] that predict the token after it.

    Raises:
        ValueError: a row has no place left (stage 13); the message has their number.
    """
    raise NotImplementedError("12.build: append is not written yet")


def greedy(model: nn.Module, prompts: Sequence[list[int]], end: int, limit: int) -> list[list[int]]:
    """The ids of the likeliest answers, token by token, one for each prompt: of equally likely tokens the first.

    The model is called once for all prompts, and once for each further token of the longest answer, with one column, and a row for each
    answer that is not finished.
    """
    raise NotImplementedError("12.build: greedy is not written yet")


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """A token of each row, by inverting the cumulative distribution. Everything is computed in float64.

    Logits are divided by the temperature. Then the fewest likeliest tokens are kept whose probabilities reach top_p, at least one; of
    equally likely tokens those with smaller ids count as likelier. What is kept is brought to a sum of 1. The first token is drawn whose
    cumulative probability, in the order of ids, exceeds `uniform`.

    Args:
        logits: [rows, vocabulary] of any floating dtype, left as they are; -inf for what may not be drawn.
        uniform: [rows] float64, at least 0 and below 1.
        temperature: positive, or 0: the likeliest token, of equal ones the first, whose probability is then 1.
        top_p: above 0, at most 1.

    Returns:
        The tokens [rows] int64, and their log-probabilities [rows] float64 under the distribution that they were drawn from.
    """
    raise NotImplementedError("12.build: draw is not written yet")


def sample(
    model: nn.Module, prompts: Sequence[list[int]], seeds: Sequence[int], end: int, limit: int, temperature: float, top_p: float
) -> list[Answer]:
    """An answer to each prompt, as by `draw`. It follows from the weights, its prompt and its seed alone: neither other answers nor the
    global generators of PyTorch and Python change it, nor are they changed. Answers of different seeds are independent. Calls as for
    `greedy`.

    Raises:
        ValueError: limit is below 1, or there are not as many seeds as prompts (stage 13): the name.
    """
    raise NotImplementedError("12.build: sample is not written yet")


def serve(
    model: nn.Module, prompts: Sequence[list[int]], seeds: Sequence[int], end: int, limit: int, temperature: float, top_p: float, rows: int
) -> list[Answer]:
    """The answers of `sample`, in the order of the prompts, with at most `rows` of them in work at a time (continuous batching).

    Prompts begin in their order, as soon as a row is free. No token is computed twice. For each token of the answers in work there is one
    call of the model with one column; prompts that begin together may share a call or have one each. The caches hold at most
    2 * rows * places places at any time, where places is the longest prompt and limit together.

    Raises:
        ValueError: rows is below 1 (stage 13), or what `sample` refuses.
    """
    raise NotImplementedError("12.build: serve is not written yet")


def score(model: nn.Module, prompts: Sequence[list[int]], answers: Sequence[list[int]], temperature: float) -> list[Tensor]:
    """The log-probabilities [tokens] of each answer's ids at a temperature, with a graph. One call of the model in its first form.

    In float32, or in float64 where the logits are. Logits that predict no token of an answer may be anything, also NaN: they reach neither
    the result nor a gradient. There is no top-p here, nor in a run: after an update a token may have left it, and would be impossible.
    """
    raise NotImplementedError("12.build: score is not written yet")


def verify(text: str, expected: int) -> float:
    """The reward of a text, which is anything that a model may write. It never raises.

        1.0   it has "<answer>" once and "</answer>" once, behind it, and between them the expected number
        0.1   it has both once, in this order, and something else between them
        0.0   all others: two answers are a guess

    A number is a whole one: 1 to 20 ASCII digits, perhaps "-" directly before them, zeros in front or not. Spaces, and nothing else, may
    stand around it.
    """
    raise NotImplementedError("12.build: verify is not written yet")


def advantages(rewards: Tensor, scale: str) -> Tensor:
    """Rewards less the mean of their group; with `scale` "group" divided by its deviation (over n - 1) + 1e-4, with "none" by nothing.

    Where all rewards of a group are equal, whichever they are, its advantages are exactly 0.

    Args:
        rewards: [prompts, group] float64, left as they are.
    """
    raise NotImplementedError("12.build: advantages is not written yet")


def token_losses(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, settings: Settings) -> Tensor:
    """The loss of each token: -min(ratio * advantage, ratio * advantage with the ratio clipped to 1 - clip_low and 1 + clip_high).

    With `level` "token" the ratio is the token's own, pi / pi when it was drawn. With "sequence" all tokens of an answer share the
    geometric mean of their ratios (GSPO), and its gradient reaches each of them.

    Args:
        log_probs, old: [answers, tokens], now and when they were drawn. No gradient flows to `old`.
        advantages: [answers]. No gradient flows to them.
        mask: [answers, tokens] bool, whether there is a token; at least one in each row. Elsewhere the others may hold anything, inf and
            NaN too.

    Returns:
        [answers, tokens], 0 where there is no token, where the gradient of `log_probs` is 0 too.
    """
    raise NotImplementedError("12.build: token_losses is not written yet")


def token_weights(lengths: Sequence[int], settings: Settings) -> Tensor:
    """How much each token of an answer counts: the loss of a step is the sum of its tokens' losses times these.

        "token"      all tokens of the step alike: their mean (DAPO)
        "sequence"   the mean over answers of the mean over an answer's tokens (GRPO)
        "constant"   the sum over tokens, divided by answers times limit (Dr. GRPO)

    Args:
        lengths: the tokens of each answer of a step, of all its micro-batches.

    Returns:
        [answers] float64.
    """
    raise NotImplementedError("12.build: token_weights is not written yet")


def update(model: nn.Module, optimizer: torch.optim.Optimizer, experiences: Sequence[Experience], settings: Settings) -> float:
    """A step of the optimizer on experiences, in micro-batches of micro_size, the last one with those that are left. A micro-batch costs
    one call of the model, and its graph is gone before the next call. The gradients stay after the step, until the next one.

    Returns:
        The loss.

    Raises:
        ValueError: there are no experiences, or the loss is not finite (stage 13). The weights are then as they were.
    """
    raise NotImplementedError("12.build: update is not written yet")


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    prompts: Sequence[list[int]],
    reward: Callable[[int, list[int]], float],
    settings: Settings,
    seed: int,
) -> object:
    """A run, whatever you make it. The model is not called.

    A rollout draws `group` answers to each of the next `prompts` prompts, at once and without top-p, and has `updates` steps. Prompts come
    in epochs, each with all prompts once, in an order that follows from the seed and the epoch alone; a rollout may begin in one epoch and
    end in the next. The answers follow from the seed and the weights; no two rollouts share their seeds.

    Args:
        reward: called once for each answer, with the number of its prompt from 0 and the answer's ids.

    Raises:
        ValueError: see `check_settings`; there are fewer prompts than a rollout has, or an empty one (stage 13).
    """
    raise NotImplementedError("12.build: start is not written yet")


def advance(run: object, steps: int) -> list[dict[str, float]]:
    """The next steps of a run, by the optimizer.

    Returns:
        For each step "loss", and of its rollout "reward", the mean over all answers, and "flat", the share of groups whose advantages are
        all 0.

    Raises:
        ValueError: a reward is no number, or not finite (stage 13): the number of the prompt, and the reward. What `reward` raises comes
            through as it is.
    """
    raise NotImplementedError("12.build: advance is not written yet")


def save(run: object, folder: Path) -> None:
    """Save a run between two steps, in files of your own. The folder need not exist. The run can be continued afterwards as well."""
    raise NotImplementedError("12.build: save is not written yet")


def resume(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    prompts: Sequence[list[int]],
    reward: Callable[[int, list[int]], float],
    settings: Settings,
    seed: int,
    folder: Path,
) -> object:
    """A run from its folder, with what `start` was given. `model` may have any weights, and `optimizer` is new. Neither the model nor the
    reward is called, and answers that were drawn are not drawn again.

    Raises:
        ValueError: the folder has no run (its path), or one with other prompts, other settings or another seed (stage 13).
    """
    raise NotImplementedError("12.build: resume is not written yet")


def check_settings(settings: Settings) -> None:
    """Refuse settings that cannot be right.

    Raises:
        ValueError: a key is unknown or missing, or a value is not what the text above asks of it: the key, and the value if there is one. A
            bool, NaN and infinity are no numbers.
    """
    raise NotImplementedError("12.build: check_settings is not written yet")
