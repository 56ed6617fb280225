"""Build 06: the stages and their cases."""

from .common import stages
from .limits import BUCKETS, BUDGETS, IN_THE_LAST
from .memory import HELD, KEPT, PEAKS
from .refusals import BAD_INPUT
from .sharding import GATHER, RECOMPUTE, STATE
from .shares import SHARDED_SHARES, ZERO_SHARES
from .stepping import ACCUMULATE, CLIP, GRADIENTS, ORDERS, REDUCE, START, ZERO

STAGES = stages(
    "06.build",
    start=(("make_replica",), START),
    gradients=(("backward", "gradients"), GRADIENTS),
    buckets=((), (*BUCKETS, *ORDERS)),
    accumulate=((), (*ACCUMULATE, *IN_THE_LAST)),
    zero=(("make_zero", "update"), (*ZERO, *ZERO_SHARES)),
    gather=(("make_sharded", "forward"), (*GATHER, *HELD)),
    reduce=((), (*REDUCE, *SHARDED_SHARES)),
    recompute=((), (*RECOMPUTE, *KEPT)),
    clip=((), CLIP),
    state=(("state", "load"), STATE),
    budgets=((), (*BUDGETS, *PEAKS)),
    bad_input=((), BAD_INPUT),
)
