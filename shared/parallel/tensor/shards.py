"""Chapter 07. Tensor-parallel sharding plan, as data: which weights are column-parallel, row-parallel or unsharded, and which gradients are
summed over ranks.

Both are tables by parameter name. `shared.parallel.tensor.axis` cuts the model by the first, and states the second on the parameters,
where data engines, clipping and checkpoints read it.
"""

from collections.abc import Mapping, Sequence

from shared.course.binding import exercise
from shared.model.sharding import Range


@exercise("07.tensor_shards")
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


@exercise("07.gradient_sums")
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
