"""Check of 07.tensor_shards. Oracle: layers that are computed in slices and added up or laid side by side, compared with whole ones.

Tolerances. Slices are whole numbers, compared exactly. Sums of float64 products in another order: 1e-12.
"""

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check

from .ranks import CONTRACT, randn

SPLIT = "torch.Tensor.tensor_split of the dimension"
ORACLE = "torch: the whole layer in one process"


def of(head_dim: int, ranks: int, **shapes):
    """Arguments. Names are written with two underscores for a dot."""
    return lambda: {"shapes": {name.replace("__", "."): [*shape] for name, shape in shapes.items()}, "head_dim": head_dim, "ranks": ranks}


def tell(**cuts):
    return lambda **_: {"cuts": {name.replace("__", "."): cut for name, cut in cuts.items()}}


def split(dimension: int):
    """Expected: every parameter is cut along a dimension as tensor_split cuts."""

    def told(shapes, head_dim, ranks):
        cuts = {}
        for name, shape in shapes.items():
            parts = torch.arange(shape[dimension]).tensor_split(ranks)
            cuts[name] = dimension, [(int(part[0]), int(part[-1]) + 1) for part in parts]
        return {"cuts": cuts}

    return told


def attention_shapes(prefix: str, width: int, heads: int, key_value_heads: int, head_dim: int, biases: bool = False) -> dict:
    sizes = {"q_proj": heads * head_dim, "k_proj": key_value_heads * head_dim, "v_proj": key_value_heads * head_dim}
    shapes = {f"{prefix}.{name}.weight": [size, width] for name, size in sizes.items()}
    shapes[f"{prefix}.o_proj.weight"] = [width, heads * head_dim]
    return shapes | ({f"{prefix}.{name}.bias": [size] for name, size in (sizes | {"o_proj": width}).items()} if biases else {})


def sliced(tensors, cuts, rank):
    """This rank's slice of each tensor, and the whole of one without a cut."""
    found = {}
    for name, tensor in tensors.items():
        dimension, ranges = cuts.get(name, (0, None))
        found[name] = tensor if ranges is None else tensor.narrow(dimension, ranges[rank][0], ranges[rank][1] - ranges[rank][0])
    return found


def attend(x, weights, heads, head_dim, prefix):
    """Grouped-query attention of the heads that the weights make; without the bias of the last layer."""
    made = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        y = F.linear(x, weights[f"{prefix}.{name}.weight"], weights.get(f"{prefix}.{name}.bias"))
        made[name] = y.unflatten(-1, (-1, head_dim)).transpose(-2, -3)
    mixed = F.scaled_dot_product_attention(*made.values(), is_causal=True, enable_gqa=True)
    return F.linear(mixed.transpose(-2, -3).flatten(-2), weights[f"{prefix}.o_proj.weight"])


def attention_in_parts(function, width, heads, key_value_heads, head_dim, ranks, biases):
    prefix = "stack.blocks.3.cross_attention" if biases else "stack.blocks.3.attention"
    shapes = attention_shapes(prefix, width, heads, key_value_heads, head_dim, biases)
    cuts = function(shapes, head_dim, ranks)
    weights = {name: randn(*shape, seed=len(name) + shape[0]) for name, shape in shapes.items()}
    x = randn(2, 5, width, seed=1)
    parts = [attend(x, sliced(weights, cuts, rank), heads, head_dim, prefix) for rank in range(ranks)]
    held = [sliced(weights, cuts, rank)[f"{prefix}.q_proj.weight"].numel() for rank in range(ranks)]
    biases_of_rows = [name for name in cuts if name.endswith("o_proj.bias")]
    whole = attend(x, weights, heads, head_dim, prefix)
    return {"sum over the ranks": torch.stack(parts).sum(0), "numbers of q_proj by rank": held, "cut biases of rows": biases_of_rows} | {
        "of one process": whole
    }


def attention_at_once(width, heads, key_value_heads, head_dim, ranks, biases):
    whole = attention_in_parts(lambda shapes, head_dim, ranks: {}, width, heads, key_value_heads, head_dim, 1, biases)["of one process"]
    held = [heads * head_dim * width // ranks] * ranks
    return {"sum over the ranks": whole, "numbers of q_proj by rank": held, "cut biases of rows": [], "of one process": whole}


def feed_forward(x, weights):
    inner = F.silu(F.linear(x, weights["feed_forward.gate_proj.weight"], weights["feed_forward.gate_proj.bias"]))
    inner = inner * F.linear(x, weights["feed_forward.up_proj.weight"], weights["feed_forward.up_proj.bias"])
    return F.linear(inner, weights["feed_forward.down_proj.weight"])


def gated(width: int, inner: int):
    shapes = {f"feed_forward.{name}.{kind}": [inner, width][: 2 if kind == "weight" else 1] for name in ("gate_proj", "up_proj")
              for kind in ("weight", "bias")}  # fmt: skip
    return shapes | {"feed_forward.down_proj.weight": [width, inner], "feed_forward.down_proj.bias": [width]}


def feed_forward_in_parts(function, width, inner, ranks):
    shapes = gated(width, inner)
    cuts = function(shapes, 4, ranks)
    weights = {name: randn(*shape, seed=len(name)) for name, shape in shapes.items()}
    x = randn(3, width, seed=1)
    parts = [feed_forward(x, sliced(weights, cuts, rank)) for rank in range(ranks)]
    return {"sum over the ranks": torch.stack(parts).sum(0), "down_proj.bias is cut": "feed_forward.down_proj.bias" in cuts}


def feed_forward_at_once(width, inner, ranks):
    weights = {name: randn(*shape, seed=len(name)) for name, shape in gated(width, inner).items()}
    return {"sum over the ranks": feed_forward(randn(3, width, seed=1), weights), "down_proj.bias is cut": False}


def given(**arguments):
    return lambda: dict(arguments)


def plan(function, **arguments):
    """The cuts, and which of them have their slices in something else than a list."""
    cuts = function(**arguments)
    other = [name for name, (_, ranges) in cuts.items() if type(ranges) is not list] if type(cuts) is dict else ["all"]
    return {"cuts": cuts} | ({"returned no list of slices for": other} if other else {})


def case(rung, title, arguments, expected, source=CONTRACT, observe=plan):
    return Case(rung, title, arguments, expected, source, observe, rtol=1e-12, atol=1e-12)


HALVES = [(0, 5), (5, 10)]
PAIRS = [(0, 3), (0, 3), (3, 6), (3, 6)]
BLOCK = "stack__blocks__0__"
WHOLE = {
    f"{BLOCK}attention_norm__weight": [12], f"{BLOCK}attention__q_norm__weight": [4], f"{BLOCK}attention__o_proj__bias": [12],
    f"{BLOCK}feed_forward__down_proj__bias": [12], "stack__final_norm__weight": [12], "embedding__positions__weight": [16, 12],
    "embedding__types__weight": [2, 12], "embedding__norm__bias": [12], "head__transform__weight": [12, 12], "head__transform__bias": [12],
    "head__norm__weight": [12],
}  # fmt: skip

CHECK = Check(
    exercise="07.tensor_shards",
    outputs=("cuts",),
    spoilt=("cuts",),
    cases=[
        case(
            "shape and dtype", "up_proj, weight and bias, over two ranks", of(2, 2, mlp__up_proj__weight=[6, 4], mlp__up_proj__bias=[6]),
            tell(mlp__up_proj__weight=(0, [(0, 3), (3, 6)]), mlp__up_proj__bias=(0, [(0, 3), (3, 6)])),
        ),
        case(
            "worked example", "a gated feed-forward over two ranks",
            of(2, 2, ff__gate_proj__weight=[10, 4], ff__up_proj__weight=[10, 4], ff__down_proj__weight=[4, 10], ff__down_proj__bias=[4]),
            tell(ff__gate_proj__weight=(0, HALVES), ff__up_proj__weight=(0, HALVES), ff__down_proj__weight=(1, HALVES)),
        ),
        case(
            "worked example", "attention with 6 heads and 3 key-value heads of 5, over three ranks",
            lambda: {"shapes": attention_shapes("attention", 8, 6, 3, 5, biases=True), "head_dim": 5, "ranks": 3},
            lambda **_: {"cuts": {
                f"attention.{name}": cut for name, cut in {
                    "q_proj.weight": (0, [(0, 10), (10, 20), (20, 30)]), "k_proj.weight": (0, [(0, 5), (5, 10), (10, 15)]),
                    "v_proj.weight": (0, [(0, 5), (5, 10), (10, 15)]), "o_proj.weight": (1, [(0, 10), (10, 20), (20, 30)]),
                    "q_proj.bias": (0, [(0, 10), (10, 20), (20, 30)]), "k_proj.bias": (0, [(0, 5), (5, 10), (10, 15)]),
                    "v_proj.bias": (0, [(0, 5), (5, 10), (10, 15)]),
                }.items()
            }},
        ),
        case(
            "worked example", "two key-value heads of 3 for four ranks",
            of(3, 4, attention__k_proj__weight=[6, 7], attention__v_proj__bias=[6]),
            tell(attention__k_proj__weight=(0, PAIRS), attention__v_proj__bias=(0, PAIRS)),
            "arithmetic: ranks 0 and 1 have the first half of the query heads, which the first key-value head serves",
        ),
        case(
            "worked example", "a vocabulary of 11 over three ranks",
            of(2, 3, embedding__tokens__weight=[11, 4], head__linear__weight=[11, 4], head__linear__bias=[11]), split(0), SPLIT,
        ),
        case("worked example", "relative biases of 6 heads, [32, 6]", of(4, 3, encoder__relative_bias__weight=[32, 6]), split(1), SPLIT),
        case("worked example", "what stays whole", of(4, 2, **WHOLE), tell()),
        case("property", "nothing to cut", of(4, 2), tell()),
        case(
            "property", "one key-value head for three ranks", of(5, 3, self_attention__v_proj__weight=[5, 7]),
            tell(self_attention__v_proj__weight=(0, [(0, 5)] * 3)),
        ),
        case("property", "12 tokens on four ranks", of(2, 4, embedding__tokens__weight=[12, 3], head__linear__bias=[12]), split(0), SPLIT),
        case("property", "7 tokens on five ranks", of(2, 5, head__linear__weight=[7, 3]), split(0), SPLIT),
        case("property", "a vocabulary smaller than a head is wide", of(64, 2, embedding__tokens__weight=[9, 3]), split(0), SPLIT),
        case("property", "fewer inner features than heads have", of(8, 2, ff__up_proj__weight=[6, 3], ff__down_proj__weight=[3, 6]),
             tell(ff__up_proj__weight=(0, [(0, 3), (3, 6)]), ff__down_proj__weight=(1, [(0, 3), (3, 6)]))),
        case("property", "blocks of an encoder and of a decoder, and cross-attention",
             of(3, 2, encoder__blocks__11__attention__q_proj__weight=[6, 5], stack__blocks__1__cross_attention__q_proj__weight=[6, 5],
                stack__blocks__10__feed_forward__gate_proj__bias=[6]), split(0), SPLIT),
        case("property", "one rank", of(3, 1, attention__k_proj__weight=[6, 5], embedding__tokens__weight=[7, 5]), split(0), SPLIT),
        case(
            "oracle", "a gated feed-forward with biases", given(width=5, inner=21, ranks=3), feed_forward_at_once, ORACLE,
            feed_forward_in_parts,
        ),
        case(
            "oracle", "attention: 6 heads, 2 key-value heads, two ranks",
            given(width=7, heads=6, key_value_heads=2, head_dim=5, ranks=2, biases=False), attention_at_once, ORACLE, attention_in_parts,
        ),
        case(
            "two ranks", "cross-attention with biases: 12 heads and 2 key-value heads on six ranks",
            given(width=7, heads=12, key_value_heads=2, head_dim=3, ranks=6, biases=True), attention_at_once, ORACLE, attention_in_parts,
        ),
    ],
)  # fmt: skip
