"""The build of chapter 07: a whole LLaMA under tensor and sequence parallelism, yours from an empty file. About four hours.

    course check 07.build                all stages; course check 07.build.attention: one
    course hint 07.build.attention       three hints for each stage
    course reset 07.build                this file as it was; your text is kept

You design the model: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay thin:
a line or two each that call what you wrote. A stage whose functions still raise NotImplementedError is NOT ATTEMPTED, so you can work
from the first stage to the last and stop after any of them.

You may use everything of chapters 01 to 06, and what you wrote in exercises.py (copy it here). Of the core, `rope_tables` and `apply_rope`
of `shared.model.rope` save you an evening, and from PyTorch `F.rms_norm`, `F.scaled_dot_product_attention` and `torch.autograd.Function`.
What may not be imported is `shared.parallel.tensor` and what applies it: that is what you build. The checks run in float64, with ranks as
threads, and compare with one process to 1e-9. To try something yourself, `run_threads(function, 2)` of `shared.parallel.comm.threads` calls
function(group) on two ranks and returns what they return.

The model, in one process
    x = embedding[ids];  for each block:  x = x + attention(norm(x));  x = x + feed_forward(norm(x));  logits = head(norm(x))
    attention     q, k, v with bias; RoPE on q and k; causal; H query heads share K key-value heads; o with bias. RoPE's tables are
                  cos, sin = rope_tables(config, torch.arange(S), S), and apply_rope(q, cos, sin) takes q [B, heads, S, d]
    feed_forward  one matrix gate_up makes 2 F features, first all gates, then all ups; down(silu(gate) * up), with biases
    norm          RMSNorm with config.norm_eps, times its weight

`config` is a resolved ModelConfig (shared/model/config.py). V config.vocab_size, D hidden_size, H num_attention_heads,
K num_key_value_heads, d head_dim, F intermediate_size, L num_hidden_layers. H d need not be D. `weights` holds on every rank:

    embedding.weight                                 [V, D]
    blocks.0.attention_norm.weight                   [D]                   and so on for each of L blocks
    blocks.0.attention.q_proj.weight, .bias          [H d, D], [H d]       rows of head 0, then of head 1, ...
    blocks.0.attention.k_proj.weight, .bias          [K d, D], [K d]       v_proj as well
    blocks.0.attention.o_proj.weight, .bias          [D, H d], [D]
    blocks.0.feed_forward_norm.weight                [D]
    blocks.0.feed_forward.gate_up_proj.weight, .bias [2 F, D], [2 F]       F rows of the gate, then F rows of up
    blocks.0.feed_forward.down_proj.weight, .bias    [D, F], [D]
    final_norm.weight                                [D]
    head.weight                                      [V, D]                not tied to the embedding

`group` is the communicator of all ranks (shared/parallel/comm/communicator.py): group.rank, group.size, group.all_reduce(tensor),
all_gather(whole, part), reduce_scatter(part, whole). They work in place on contiguous tensors, join and cut along dimension 0, and autograd
does not see them. group.split(name, groups), with lists of ranks such as [[0, 1], [2, 3]] the same on all ranks, returns the smaller
group that this rank is in.

The stages (stages 1 to 4 call their functions on models without sequence parallelism only)
    1 weights            cut every weight; say of each part where it lies in the whole
    2 feed_forward       column-parallel, then row-parallel: one all-reduce forward, one backward. A layer that sends nothing is a copy
    3 attention          whole heads on each rank; query heads stay with the key-value head that they share
    4 vocabulary         embedding, head and loss over tokens that are cut; V need not divide: no rank has more than V / ranks, rounded up.
                         V is never below the number of ranks
    5 model              logits, loss and every gradient on two ranks are one process's
    6 four_ranks         four ranks with two key-value heads, or one: each head lies on several ranks, for other query heads on each
    7 sequence_parallel  between the sublayers each rank has its own positions of the stream: it is reduce-scattered, never all-reduced.
                         What the nine functions get and return stays the same. Stage 8 checks that norms see no other positions
    8 budgets            forward and backward together, each layer has 4 all-reduces of the stream, or with sequence parallelism 4
                         all-gathers and 4 reduce-scatters of it; gradients that are summed come on top. Embedding and head together have
                         2 all-reduces of it (2 all-gathers and 2 reduce-scatters) and the loss a few numbers for each position. Under
                         sequence parallelism each sublayer and the head may gather their input once more in the backward pass.
                         No rank ever makes the logits of all tokens, or a whole matrix. With sequence parallelism autograd keeps the
                         whole stream [B, S, D] at most 2 L + 1 times for the backward pass: as the sublayers and the head have
                         gathered it. What norms keep is cut by the ranks
    9 bad_input          sizes that cannot be cut, a sequence that cannot, ids outside the vocabulary, targets outside it other than -100:
                         a ValueError with the numbers, on every rank, before anything is sent. It is make_model and
                         loss_and_gradients that must refuse; embed, head_loss and logits may
"""

from torch import Tensor

from shared.model.config import ModelConfig
from shared.parallel.comm.communicator import Communicator


def make_model(config: ModelConfig, weights: dict[str, Tensor], group: Communicator, sequence_parallel: bool = False) -> object:
    """This rank's part of the model, whatever you make it. It keeps copies of its parts alone, so that the whole weights can be freed.

    Raises:
        ValueError: H or F does not divide by the ranks, or neither of K and the ranks divides the other; the message has both numbers.
    """
    raise NotImplementedError("07.build: make_model is not written yet")


def state(model: object) -> dict[str, Tensor]:
    """This rank's part of each weight, under the weight's name."""
    raise NotImplementedError("07.build: state is not written yet")


def layout(model: object) -> dict[str, tuple[Tensor, ...]]:
    """Where each part lies in the whole: under the weight's name one index tensor for each dimension (int64), so that

    part == whole[rows][:, columns]    for layout[name] == (rows, columns);    part == whole[rows] for a vector's (rows,)
    """
    raise NotImplementedError("07.build: layout is not written yet")


def feed_forward(model: object, layer: int, x: Tensor) -> Tensor:
    """One block's feed-forward layer, without norm and residual: [B, S, D] -> [B, S, D], both the same on all ranks.

    As everywhere here, backward from the result gives x the gradient that it has in one process, on every rank.
    """
    raise NotImplementedError("07.build: feed_forward is not written yet")


def attention(model: object, layer: int, x: Tensor) -> Tensor:
    """One block's attention, without norm and residual: [B, S, D] -> [B, S, D], both the same on all ranks. Positions are 0 to S - 1."""
    raise NotImplementedError("07.build: attention is not written yet")


def embed(model: object, ids: Tensor) -> Tensor:
    """ids [B, S] -> embeddings [B, S, D], the same on all ranks."""
    raise NotImplementedError("07.build: embed is not written yet")


def head_loss(model: object, x: Tensor, targets: Tensor) -> Tensor:
    """The sum over all positions of the cross-entropy of head(x) with the targets, the same on all ranks; targets of -100 do not count.

    Args:
        x: [B, S, D], what the head reads: the last norm is done.
        targets: [B, S].
    """
    raise NotImplementedError("07.build: head_loss is not written yet")


def loss_and_gradients(model: object, ids: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """One forward and backward pass of the whole model. ids and targets [B, S] are whole, and the same on all ranks.

    Returns:
        The summed loss, the same on all ranks, and under each weight's name the gradient of this rank's part, in its shape. Ranks that
        hold the same numbers return the same gradient: the whole one. Called again, it returns the same again.

    Raises:
        ValueError: an id or a target outside the vocabulary, or a sequence that sequence parallelism cannot cut.
    """
    raise NotImplementedError("07.build: loss_and_gradients is not written yet")


def logits(model: object, ids: Tensor) -> Tensor:
    """ids [B, S] -> the logits of this rank's tokens [B, S, tokens of this rank], in the order of layout["head.weight"]."""
    raise NotImplementedError("07.build: logits is not written yet")
