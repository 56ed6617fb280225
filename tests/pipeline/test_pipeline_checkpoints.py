"""Checkpoints of a pipeline: every layout resumes those of another, with the weights of a run that nobody stopped."""

import pytest
from layout_runs import largest_difference
from pipeline_runs import expected, on_ranks

FOLDERS = [("one", "1f1b"), ("pp2", "1f1b"), ("pp4", "zero_bubble"), ("pp2", "interleaved"), ("fsdp2", "1f1b"), ("pp2_fsdp2", "1f1b"),
           ("pp2_tp2", "1f1b")]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FOLDERS)))
def test_every_layout_resumes_the_checkpoints_of_another(number, tmp_path):
    writer, *readers = FOLDERS[number:] + FOLDERS[:number]
    on_ranks(lambda run: run.train(2).save(tmp_path, asynchronous=False), writer[0], "gpt2", "adamw", writer[1])
    for layout, schedule in (readers[0], readers[2]):
        found = on_ranks(lambda run: run.restore(tmp_path).train(1).weights(), layout, "gpt2", "adamw", schedule, seed=9)
        merged = {name: tensor for each in found for name, tensor in each.items()}
        weights = expected("gpt2", "adamw")["weights"]
        assert largest_difference(without_key_biases(merged), without_key_biases(weights)) < 1e-9, f"{writer} to {layout}, {schedule}"


def without_key_biases(tensors: dict) -> dict:
    """They move all scores of a query equally, so their gradients are rounding."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("k_proj.bias")}
