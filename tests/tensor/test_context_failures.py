"""Context parallelism after an objective that failed: the model computes whole sequences again, as outside of any objective."""

import pytest
import torch
from context_runs import batches, config_of

from shared.model.transformer import TransformerModel
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.context.axis import ContextParallel
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import AXES, apply_parallel


def failing(model, batch):
    model(batch["input_ids"])
    raise FloatingPointError("no number")


def test_after_an_objective_that_failed_whole_sequences_are_computed():
    batch = batches(0, 0, config_of("llama"))
    ids = batch["input_ids"][:, :7]  # of no length that could be shared out
    plain = TransformerModel(config_of("llama")).double().eval()(ids)

    def work(world):
        mesh = Mesh(ParallelConfig(context_parallel=2), world)
        strategy = apply_parallel(TransformerModel(config_of("llama")).double(), mesh, axes=(*AXES, ContextParallel()))
        with pytest.raises(FloatingPointError, match="no number"):
            strategy.objective(failing)(strategy.model, batch)
        return strategy.model.eval()(ids)

    for logits in run_threads(work, 2):
        assert torch.equal(logits, plain)
