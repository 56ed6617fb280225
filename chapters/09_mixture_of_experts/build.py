"""The build of chapter 09: a mixture-of-experts layer spread over ranks, yours from an empty file. About four hours.

    course check 09.build                all stages; course check 09.build.route: one
    course hint 09.build.route           three hints for each stage
    course reset 09.build                this file as it was; your text is kept

You design the layer: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay
thin: a line or two each that call what you wrote. A stage whose functions still raise NotImplementedError is NOT ATTEMPTED, so you can work
from the first stage to the last and stop after any of them. `spread` and `bad_input` also check functions of earlier stages, so they
can fail before you begin them: until then let `make_layer` raise NotImplementedError for a group of several ranks.

You may use everything of chapters 01 to 08. You need nothing of this chapter's exercises, and may copy from them. The modules of
`shared.moe` and `shared.moe.parallel` may not be imported, nor may `transformers`. Unless a stage says otherwise the checks run in
float64, with ranks as threads, and compare with one process, in which every expert sees every token, to 1e-9. To try something yourself,
`run_threads(function, 2)` of `shared.parallel.comm.threads` calls function(group) on two ranks and returns what they return.

Letters: T tokens, or B rows of S tokens; D the model's width; E experts; I an expert's inner width; k experts chosen by each token.

The layer
    probabilities   softmax(x router.weight^T), over the experts
    choice          the k experts with the largest probability + router.bias; of equals, the lower number first
    weights         the probabilities of the chosen experts, without the bias; divided by their sum if `renormalize`
    expert e        down_e (silu(gate_e x) * (up_e x))
    y               the sum over a token's choices of weight * expert(x)
Whole weights are a dictionary: router.weight [E, D], router.bias [E], experts.gate_proj.weight and experts.up_proj.weight [E, I, D],
experts.down_proj.weight [E, D, I]. The bias moves the choice and nothing else; it has no gradient.

`valid` [B, S], bool, says which tokens count in the losses and in the load. The layer computes all tokens alike.

Ranks form a grid. `group` is the communicator of the ranks that share out one set of experts: rank r holds experts r * E / size up to
(r + 1) * E / size, and the router whole. `replicas` is the communicator of the ranks that hold the same experts as this one, each in a
group of its own. Both can have size 1. Every rank has tokens of its own; some may have none. A communicator
(shared/parallel/comm/communicator.py) has rank, size, all_to_all(received, sent), all_reduce(tensor), all_gather(whole, part) and more.
Ranks count within the group, tensors are contiguous, and autograd sees none of it.

The stages (up to stage 5 there is one process, and the communicators have size 1)
    1 route      the choice and its weights, computed in float32 (in x's dtype where that is wider), also under autocast
    2 dispatch   tokens sorted by expert, without a Python loop over tokens
    3 experts    the experts' products in three ways that agree; an expert without rows has a gradient of zero
    4 layer      the whole layer, in the dtype of x, its gradients and x's
    5 losses     of tokens that count, as sums over the rows:
                 balance  for each row of n tokens that count: n * E / k * sum over experts of f * P, where f is the expert's choices in
                          the row / n, without a gradient, and P the mean of its probability; an even choice gives n
                 z        the sum of logsumexp(logits) ** 2
    6 exchange   rows travel between ranks, as many from each to each as they have, and gradients travel back
    7 spread     experts over ranks: y and the gradients are one process's; a rank without tokens, or whose experts have none, joins in.
                 After backward passes alone, the router has the gradient of this rank's own tokens
    8 gradients  a step: the loss of all ranks divided once; each gradient on each rank is one process's
    9 balance    loads are counted over the tokens that count on all ranks, and the bias moves towards equal load
    10 recompute a block may call the layer again before its backward pass (activation checkpointing), and several calls may wait for their
                 backward passes: nothing is counted twice, and gradients stay right
    11 budgets   `exchange` makes one call of a communicator in each pass, `forward` at most 3, and 2 in its backward pass. A choice is one
                 row there and one back, and as much in the backward pass (rows to the rank itself included); besides rows, forward sends at
                 most E numbers for each rank. A step adds at most 12 calls, the router's gradient twice, the gradients of the rank's own
                 experts once, and 128 bytes. No rank makes a tensor as large as a whole [E, I, D]. A row is multiplied by the three
                 matrices of its expert once forward and twice backward, padding by none. Python's work does not grow with the tokens. After
                 a step nothing is left but gradients
    12 bad_input what cannot be right is refused on every rank, before any row is sent: a ValueError with the numbers
"""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from shared.parallel.comm.communicator import Communicator

Batch = tuple[Tensor, Tensor, Tensor]  # x [B, S, D], targets for the loss, valid [B, S]


def route(x: Tensor, weight: Tensor, bias: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The weights [T, k] and the experts [T, k], int64, the best first, of tokens x [T, D]; weight is router.weight, bias router.bias."""
    raise NotImplementedError("09.build: route is not written yet")


def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Tokens x [T, D] with their experts [T, k] as rows sorted by expert [T * k, D], an expert's in the order of the tokens; and how many
    rows each expert has [E], int64.

    Raises:
        ValueError: an expert outside 0 to num_experts - 1 (its number, and num_experts; stage 12).
    """
    raise NotImplementedError("09.build: dispatch is not written yet")


def run_experts(
    rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor, way: Literal["loop", "batched", "grouped"]
) -> Tensor:
    """What each row's expert makes of it. rows [R, D] lie sorted by expert, counts [E]; gate and up [E, I, D], down [E, D, I].

    way: loop: products for one expert after the other. batched: torch.bmm on the rows of all experts at once, padded to the fullest, so
        three products in all. grouped: three of torch.nn.functional.grouped_mm (float32, and D and I are multiples of 4).
    """
    raise NotImplementedError("09.build: run_experts is not written yet")


def make_layer(weights: dict[str, Tensor], k: int, renormalize: bool, group: Communicator, replicas: Communicator) -> object:
    """This rank's part of the layer, whatever you make it. `weights` is the whole layer; all but this rank's part can be freed after.

    Raises:
        ValueError: the experts are no multiple of the group's ranks (both numbers), or k is not 1 to E (k and E).
    """
    raise NotImplementedError("09.build: make_layer is not written yet")


def state(layer: object) -> dict[str, Tensor]:
    """The tensors with which this rank computes, under the names of the whole weights: its own experts, the whole router and bias. All but
    the bias are leaves that require a gradient."""
    raise NotImplementedError("09.build: state is not written yet")


def forward(layer: object, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, S, D], and the sums of the balance loss and of the z-loss over this rank's tokens that count, with their gradients (nothing is
    asked of the losses before stage 5). All ranks of the group call it; B may be 0 on some.

    Raises:
        ValueError: x has another width than the layer (both numbers), or valid another shape than x's first two (both shapes; stage 12).
    """
    raise NotImplementedError("09.build: forward is not written yet")


def auxiliary_losses(logits: Tensor, experts: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The balance loss and the z-loss, scalars, of logits [B, S, E] and the chosen experts [B, S, k]."""
    raise NotImplementedError("09.build: auxiliary_losses is not written yet")


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """Rows [sum(sent), D], sorted by the rank to which they go, travel there: the rows from all ranks [sum(received), D], by rank. Autograd
    passes through it: in the backward pass gradients travel the other way. All ranks of the group call it.

    Raises:
        ValueError: there are not as many numbers as ranks (both), or `sent` does not add up to the rows (both; stage 12).
    """
    raise NotImplementedError("09.build: exchange is not written yet")


def step(layer: object, batches: Sequence[Batch], loss: Callable[..., Tensor], balance: float, z: float) -> Tensor:
    """The loss of a step, the same on every rank, and its gradients (see `gradients`). All ranks call it, each with micro-batches of its
    own, as many as the others.

        sum over all ranks and micro-batches of loss(y, targets, valid) + balance * balance loss + z * z-loss
        divided by the number of all tokens that count, on all ranks

    loss(y, targets, valid) is the sum over the tokens that count, a scalar; 0 where none does.

    Raises:
        ValueError: there are no micro-batches (0), or no token of any rank counts (0; stage 12).
    """
    raise NotImplementedError("09.build: step is not written yet")


def gradients(layer: object) -> dict[str, Tensor]:
    """The gradients of the last step, and of no other, of this rank's weights but the bias, under their names: of the loss of all ranks."""
    raise NotImplementedError("09.build: gradients is not written yet")


def gradient_norm(layer: object) -> Tensor:
    """The norm of the last step's gradient of the whole layer, each weight counted once: the same on every rank. All ranks call it."""
    raise NotImplementedError("09.build: gradient_norm is not written yet")


def update_bias(layer: object, rate: float) -> Tensor:
    """bias + rate * sign(mean load - load of the expert). All ranks call it.

    Returns:
        The loads [E], int64: how often tokens that count, of all ranks, chose each expert, in the calls of `forward` whose backward pass
        has run since the last `update_bias`.
    """
    raise NotImplementedError("09.build: update_bias is not written yet")
