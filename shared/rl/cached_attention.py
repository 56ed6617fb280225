"""Chapter 12. Attention with a KV cache: the new tokens of each row are written behind its old ones, and look at them.

A cache is preallocated, so writing a token copies one key and one value, however long the row has become. Rows stand at different places:
each writes at its own length, and what stands behind that in the cache belongs to nobody.
"""

from torch import Tensor

from shared.course.binding import exercise


@exercise("12.cached_attention")
def cached_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cached_keys: Tensor,
    cached_values: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    used: int | None = None,
) -> Tensor:
    """Attention of new tokens over a KV cache, which takes in their keys and values.

    Row b of the cache holds `lengths[b]` tokens at the places 0, 1, ... Its new token i comes to the place lengths[b] + i, and attends to
    itself and to every place before it; with a window, to the last `window` places of these alone. What comes after a row's tokens is
    left over from earlier rows: finite numbers, up to 1e30 in size, which must have no effect. Query heads share key-value heads as in
    chapter 02's `grouped_query_attention`: head h uses key-value head h // (H / K). Scores of float64 inputs are float64.

    Args:
        queries: [rows, H, new, d], one or more new tokens of each row.
        keys, values: [rows, K, new, d] of the same tokens; K divides H. They, the queries and `lengths` are not changed.
        cached_keys, cached_values: [rows, K, places, d], the cache, perhaps views into a larger one. Changed in place, at the places of the
            new tokens alone. No gradient is asked of anything here.
        lengths: [rows] int64, the tokens that each row of the cache holds already; at least 0. The caller advances them.
        scale: what the scores are multiplied by.
        window: how many places a query looks at, itself included; None for all.
        used: the length of the longest row with its new tokens, from a caller who knows it; None to find it in `lengths`. A program that
            reads a number from a GPU waits for the GPU, here once in each layer: with `used` given, no number is read from a tensor, and
            everything stays on the device of `lengths`.

    Returns:
        [rows, H, new, d] in the dtype of `values`, for all rows, heads and tokens at once. Places behind the longest row cost neither
        memory nor time.

    Raises:
        ValueError: a row has no room for its new tokens. The cache is as it was.

    >>> cached_keys, cached_values = torch.full((1, 1, 4, 1), 99.0), torch.full((1, 1, 4, 1), 99.0)
    >>> token = torch.zeros(1, 1, 1, 1)
    >>> cached_attention(token, token, token + 4, cached_keys, cached_values, torch.tensor([0]), scale=1.0)
    tensor([[[[4.]]]])
    >>> cached_attention(token, token, token + 8, cached_keys, cached_values, torch.tensor([1]), scale=1.0)       # equal scores: the mean
    tensor([[[[6.]]]])
    >>> cached_values.flatten()
    tensor([ 4.,  8., 99., 99.])
    """
