"""What comparing the ranks costs a save: milliseconds on the training thread, beside the copy that an asynchronous save makes there.

    python tests/benchmarks/replica_check.py                  2 ranks, 13.8 million parameters with AdamW
"""

import statistics
import time

from shared.engine.checkpoint.folder import whole_files
from shared.engine.checkpoint.saver import copied
from shared.engine.checkpoint.snapshot import take_snapshot
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import parse_layout
from shared.parallel.health.replicas import require_equal, require_equal_state, weights_of
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.processes.launch import run_processes

MODEL = ModelConfig(vocab_size=4096, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1024)
ADAMW = OptimizerConfig("adamw", lr=1e-3)
ROUNDS = 15


def measured(world: Communicator, layout: str) -> dict[str, list[float]]:
    """What was timed -> the slowest rank's milliseconds, round by round."""
    strategy = apply_parallel(TransformerModel(MODEL, seed=0), Mesh(parse_layout(layout), world), ADAMW)
    optimizer = build_optimizer(strategy.optim_params, ADAMW, strategy.routes)
    for parameter in strategy.optim_params.parameters():
        parameter.grad = parameter.detach().clone()
    strategy.updater(lambda model, optimizer, token_count: optimizer.step())(strategy.model, optimizer, None)
    snapshot = take_snapshot(1, strategy.state, optimizer, {})
    timed = {
        "weights": lambda: require_equal(weights_of(strategy), strategy.holders, world),
        "all, before a save": lambda: require_equal_state(strategy, snapshot, {}),
        "the save's copy": lambda: copied(whole_files(snapshot)),
    }
    found: dict[str, list[float]] = {what: [] for what in timed}
    for _ in range(ROUNDS):
        for what, call in timed.items():
            world.barrier()
            began = time.perf_counter()
            call()
            found[what].append(1000 * max(world.gather_objects(time.perf_counter() - began)))
    return found


if __name__ == "__main__":
    print("| layout | what | median, ms | fastest, ms |\n|---|---|---|---|")
    for layout in ("dp2", "dp2_zero1", "fsdp2"):
        for what, spent in run_processes(measured, 2, layout)[0].items():
            print(f"| {layout} | {what} | {statistics.median(spent):.0f} | {min(spent):.0f} |")
