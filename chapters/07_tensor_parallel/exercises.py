"""Your part of chapter 07. Write each body in place of its `raise` line, in any order.

    course check 07          checks what you wrote
    course hint 07.f_and_g    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.sharding import Range
from shared.parallel.comm.communicator import Communicator


# Megatron's f and g (25 min, difficulty 3 of 5)
def f_and_g(group: Communicator) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Make Megatron's operators f and g for a group of ranks (Shoeybi et al. 2019, section 3, figure 3).

    Autograd does not see what a group's collectives do, so each operator states its own derivative:

        y = f(x)    all ranks have the same x, and each computes another part of what follows: heads, features or tokens. So the gradient
                    of x is the sum of what the ranks' parts send back.
        y = g(x)    each rank has another x, and all ranks continue with the sum, in the same way. So every rank has the whole gradient of
                    that sum already, and the sum's derivative by this rank's x is 1.

    In Megatron's block f stands in front of matrices that are cut by columns, g behind one that is cut by rows: one all-reduce for each
    sublayer in the forward pass, and one in the backward pass.

    Args:
        group: the tensor-parallel ranks. `group.all_reduce(tensor)` replaces a contiguous tensor by the sum over the ranks, in place.

    Returns:
        f and g: functions of one tensor, of any shape and dtype, contiguous or not, which return a tensor of the same shape and dtype.
        Neither changes its argument, nor the gradient that arrives from behind it. Both are called many times, and in any order.

    >>> f, g = f_and_g(SingleRankCommunicator())
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> (3 * g(2 * f(x))).sum().backward()
    >>> x.grad
    tensor([6., 6.])
    """
    raise NotImplementedError("07.f_and_g: write this body")


# Column, row, vocabulary: who holds which slice (35 min, difficulty 3 of 5)
def tensor_shards(shapes: Mapping[str, Sequence[int]], head_dim: int, ranks: int) -> dict[str, tuple[int, list[Range]]]:
    """Decide which slice of which parameter each rank holds: column-parallel, row-parallel and vocabulary-parallel layers.

    A linear layer's `weight` is [out, in], and its `bias` [out]. Two layers in sequence need a single all-reduce if the features that a
    rank computes in the first are those that it reads in the second (Shoeybi et al. 2019, section 3). What comes before ".weight" or
    ".bias" in a parameter's name ends in the name of its layer:

        q_proj, k_proj, v_proj    column-parallel: a rank computes some of the output features, in whole heads of `head_dim`
        gate_proj, up_proj        column-parallel
        o_proj, down_proj         row-parallel: a rank reads some of the input features; the bias is added once, to the sum over the ranks
        embedding.tokens, head.linear          vocabulary-parallel: a rank has some of the tokens, with their weights and biases
        relative_bias             [buckets, heads]: a rank has its heads
        all others                whole on every rank

    Slices follow the order of the ranks: rank 0 has the first heads, features and tokens. The numbers of heads and of inner features are
    divisible by the number of ranks. Two others need not be:

        - The size of the vocabulary. Slices then differ by at most one token, and the longer ones come first.
        - The number of key-value heads. Where it is smaller than that of the ranks, it divides that of the ranks: each head is held by
          as many consecutive ranks as it takes, so that every rank's queries find the head that serves them.

    Args:
        shapes: the shape of every parameter of a model, or of some of its layers, by name.
        head_dim: features of a head.
        ranks: the tensor-parallel ranks.

    Returns:
        For each parameter that is cut: the dimension, and for each rank the start and stop of its slice. No entry for the others.

    >>> tensor_shards({"mlp.up_proj.bias": [6], "mlp.down_proj.bias": [4], "head.linear.weight": [5, 4]}, head_dim=2, ranks=2)
    {'mlp.up_proj.bias': (0, [(0, 3), (3, 6)]), 'head.linear.weight': (0, [(0, 3), (3, 5)])}
    """
    raise NotImplementedError("07.tensor_shards: write this body")


# Row-parallel linear layer (10 min, difficulty 1 of 5)
def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, combine: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a row-parallel linear layer, of which this rank holds some input features (Shoeybi et al. 2019, section 3).

        y = x_0 A_0 + x_1 A_1 + ... + b          rank r has x_r and A_r, and so one summand of each output

    Args:
        x: [..., in / ranks], this rank's input features.
        weight: [out, in / ranks], its part of the layer's weight [out, in].
        bias: [out], the layer's bias, the same on all ranks; or None.
        combine: adds up the ranks' tensors, in the forward pass and for the backward pass: g, from [..., out] to [..., out]; or, with
            sequence parallelism, a reduce-scatter, which returns this rank's positions of the sum only. It is communication, and called
            once.

    Returns:
        What the uncut layer computes of the whole x, in the product's dtype (bfloat16 under autocast, though the bias is float32):
        [..., out]; of this rank's positions where `combine` returns only those.

    >>> x, weight, bias = torch.tensor([2.0]), torch.tensor([[10.0], [100.0]]), torch.tensor([1.0, 1.0])
    >>> row_linear(x, weight, bias, combine=lambda part: part + torch.tensor([3.0, 4.0]))      # what another rank has
    tensor([ 24., 205.])
    """
    raise NotImplementedError("07.row_linear: write this body")


# Vocabulary-parallel cross-entropy (35 min, difficulty 4 of 5)
def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """Compute cross-entropy from logits of which each rank has some tokens' columns (Shoeybi et al. 2019, section 3).

        loss = log(sum over all tokens of exp(logit)) - logit of the target

    Gathering all logits would send and hold [rows, vocab] numbers. Two all-reduces are enough: of one number for each row, then of two. And
    a rank never holds more than three further tensors of the shape of its own logits. Exponentials overflow from 89 on (in float32), and
    logits may be larger: as in one process, the largest of the row is subtracted first, here the largest over all ranks.

    Args:
        logits: [rows, vocab of this rank], at least one column; another rank may have a column more or less. A token that cannot be has
            minus infinity. Autograd is off in here: the gradient is computed elsewhere, from the normalizer.
        targets: [rows] int64, the same on all ranks: tokens of the whole vocabulary, or -100 for a row that does not count.
        first: the token of this rank's first column.
        group: the ranks that share the vocabulary. `group.all_reduce(tensor, op="max")` replaces a contiguous tensor by the maximum over
            the ranks; op="sum" is the default.

    Returns:
        Three tensors, the same on all ranks, the first two in the dtype of the logits, or in float32 where the logits are narrower. All
        numbers are computed and sent in that dtype, too.

        losses: [rows]; 0 where a row does not count.
        normalizer: [rows], the logarithm of the sum of exponentials over the whole vocabulary, of all rows.
        correct: [rows] bool, whether the target's logit is the largest of its row, alone or in a tie; False where a row does not count.

    >>> logits, targets = torch.tensor([[0.0, 0.0], [0.0, 2.0]]).log1p(), torch.tensor([3, -100])     # 1, 1 and 1, 3 after exp
    >>> vocabulary_cross_entropy(logits, targets, first=2, group=SingleRankCommunicator())
    (tensor([0.6931, 0.0000]), tensor([0.6931, 1.3863]), tensor([ True, False]))
    """
    raise NotImplementedError("07.vocabulary_cross_entropy: write this body")


# Who sums whose gradient (25 min, difficulty 3 of 5)
def gradient_sums(names: Sequence[str], sequence_parallel: bool, copied_heads: bool) -> dict[str, str]:
    """Decide over which ranks each parameter's gradient is still to be summed after the backward pass.

    A rank has the gradient of what it has computed. Of a slice that no other rank holds, that is all. Of a parameter that several ranks
    hold, it is all where every rank computed the same with it, on the same input, and received the same gradient; where ranks computed
    different things, each has a part, and the parts are summed. Which parts of the model compute what (Korthikanti et al. 2022,
    section 4.2.2), by the names of modules:

        attention, cross_attention    q_proj, k_proj, v_proj make this rank's heads, which q_norm and k_norm normalise; o_proj adds its bias
                                      to the sum over the ranks
        feed_forward                  up_proj, gate_proj make this rank's features; down_proj adds its bias to the sum over the ranks
        attention_norm, cross_attention_norm, feed_forward_norm, final_norm
                                      normalise the residual stream between the sublayers, of which every rank has all positions; with
                                      sequence parallelism, each rank has its own positions only, of the stream and of what o_proj and
                                      down_proj add to it, bias included
        embedding                     makes the stream, whole on every rank; sequence parallelism cuts it after that
        head                          gets the stream whole. f comes first; BERT has two more layers, transform and norm, between f and
                                      `linear`: what flows back to them is of this rank's tokens only

    Args:
        names: parameters of the model, such as "stack.blocks.0.attention.q_norm.weight".
        sequence_parallel: whether the residual stream is cut along the sequence.
        copied_heads: whether there are fewer key-value heads than ranks, so that several ranks hold the same one for different queries.

    Returns:
        For each parameter of which ranks have parts: "all" where all tensor-parallel ranks do, "copies" where those do that hold copies of
        the same key-value head. No entry for the others.

    >>> names = ["stack.blocks.0.attention.q_norm.weight", "embedding.norm.weight", "stack.final_norm.weight"]
    >>> gradient_sums(names, sequence_parallel=False, copied_heads=False)
    {'stack.blocks.0.attention.q_norm.weight': 'all'}
    """
    raise NotImplementedError("07.gradient_sums: write this body")


# The merge of two partial attentions (20 min, difficulty 2 of 5)
def merge_attention(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention to some of the keys with attention to others, as ring and flash attention do (Dao et al. 2022, section 3.1).

        out = sum over keys j of exp(s_j - lse) v_j          lse = log of the sum over keys j of exp(s_j)

    Each of the two was computed as if its keys were all there are: a softmax over its own scores s. The log-sum-exp is the
    logarithm of the sum of their exponentials, by which the two are weighed as one softmax over all keys would weigh them.

    Scores of a few hundred are common, and exp overflows from 89 on in float32. Take no exponential of anything above 0.

    Args:
        out, other_out: [batch, heads, queries, d], any floating dtype; 0 where the query may look at none of these keys.
        lse, other_lse: [batch, heads, queries] in float32 (float64 for float64 outputs); -inf there.

    Returns:
        out, lse of attention to the keys of both, in the shapes of the arguments, computed and returned in float32 (float64 for float64),
        because a ring merges many times. A query that may look at no key of either gets an output of 0 and -inf, and nothing is NaN.

    >>> out, other_out = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[5.0, 2.0]]]])
    >>> merge_attention(out, torch.tensor([[[0.0]]]), other_out, torch.tensor([[[0.0]]]))      # equally heavy: the mean of the two
    (tensor([[[[3., 1.]]]]), tensor([[[0.6931]]]))
    >>> merge_attention(out, torch.tensor([[[7.0]]]), 0 * other_out, torch.tensor([[[-torch.inf]]]))
    (tensor([[[[1., 0.]]]]), tensor([[[7.]]]))
    """
    raise NotImplementedError("07.merge_attention: write this body")
