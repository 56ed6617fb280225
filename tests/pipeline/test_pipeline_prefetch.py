"""The order in which a sharded stage gathers its blocks: also backward, the next one begins before the gradients of this one are reduced."""

from pipeline_runs import on_ranks


def test_a_stage_gathers_the_block_before_while_one_goes_backward():
    """Of each block, both operations of a micro-batch's backward pass; the last of four layers' blocks on each rank first."""

    def backward(run):
        run.train(1)
        entries = [entry for entry in run.world.trace.entries if entry.axis == "fsdp" and entry.phase == "backward"]
        return [entry.operation for entry in entries][:4]

    ahead = ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    behind = ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
    assert on_ranks(backward, "pp2_fsdp2", microbatches=1, prefetch=1) == [ahead] * 4
    assert on_ranks(backward, "pp2_fsdp2", microbatches=1, prefetch=0) == [behind] * 4
