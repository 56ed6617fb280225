"""Build 06: the stages and their cases."""

from shared.course.checking import Check

from .limits import BUCKETS, BUDGETS, IN_THE_LAST
from .memory import HELD, KEPT, PEAKS
from .shares import SHARDED_SHARES, ZERO_SHARES
from .stepping import ACCUMULATE, CLIP, GRADIENTS, ORDERS, REDUCE, START, ZERO
from .sharding import GATHER, RECOMPUTE, STATE
from .refusals import BAD_INPUT

STAGES = {
    "start": START,
    "gradients": GRADIENTS,
    "buckets": (*BUCKETS, *ORDERS),
    "accumulate": (*ACCUMULATE, *IN_THE_LAST),
    "zero": (*ZERO, *ZERO_SHARES),
    "gather": (*GATHER, *HELD),
    "reduce": (*REDUCE, *SHARDED_SHARES),
    "recompute": (*RECOMPUTE, *KEPT),
    "clip": CLIP,
    "state": STATE,
    "budgets": (*BUDGETS, *PEAKS),
    "bad_input": BAD_INPUT,
}
STAGES = {name: Check(f"06.build.{name}", (), cases, ()) for name, cases in STAGES.items()}
