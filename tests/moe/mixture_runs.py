"""Three steps of a small mixture of experts on a layout, in float64, with the update of the routers' biases after each."""

from dataclasses import replace
from functools import cache

import torch
from brute_force import CONFIG
from context_runs import batches
from layout_runs import LayoutRun
from sharded_runs import ADAMW, MUON
from step_records import STEPS
from torch import Tensor

from shared.model.chunked_loss import packed_next_token_objective
from shared.moe.balancing import take_loads, update_bias
from shared.model.roles import parameters_by_role
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig
from shared.moe.layer import mixture_layers
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.health.replicas import require_equal
from shared.trainer.models import RUN_AXES

EXPERTS = MixtureConfig(
    4, 16, balance_coefficient=0.3, z_coefficient=0.05, bias_update_rate=0.02, num_shared_experts=1, first_k_dense=1, capacity_factor=1.2
)
MODEL = replace(CONFIG, num_hidden_layers=4, experts=EXPERTS, initializer_range=0.1)
OPTIMIZERS = {"adamw": ADAMW, "muon": MUON}


class MixtureRun(LayoutRun):
    def __init__(self, world, layout: ParallelConfig, optimizer: str = "adamw", config=MODEL, scale: float | None = None, **settings):
        scaler = LossScaler(LossScaleConfig(initial=scale)) if scale else None
        settings = {"objective": packed_next_token_objective, "axes": RUN_AXES, "batches": batches} | settings
        super().__init__(world, layout, config, OPTIMIZERS[optimizer], scaler=scaler, builders=MIXTURE, **settings)
        self.loads: list[dict[int, Tensor]] = []

    def train(self, steps: int) -> "MixtureRun":
        def add(loads: Tensor) -> Tensor:
            self.mesh.loss.all_reduce(loads)
            return loads

        for _ in range(steps):
            super().train(1)
            self.loads.append(take_loads(self.plain, add))
            for layer in mixture_layers(self.plain):
                update_bias(layer, self.loads[-1][layer.layer])
        return self


def observed(run: MixtureRun) -> dict:
    losses, norms, gradients, roles = [], [], [], []
    for _ in range(STEPS):
        run.train(1)
        losses.append(run.totals.loss_sum)
        norms.append(run.update.gradient_norm)
        gradients.append({name: gradient for name, gradient in run.gradients().items() if gradient is not None})
        named = parameters_by_role(run.parallel.grad_params)
        with_gradient = {role: {name: p.grad for name, p in of.items() if p.grad is not None} for role, of in named.items()}
        roles.append(run.parallel.norms(with_gradient))
    require_equal(run.parallel.state.state_dict(keep_vars=True), run.parallel.holders, run.world)
    weights = run.weights()
    return {"losses": losses, "norms": norms, "gradients": gradients, "roles": roles, "weights": weights, "loads": run.loads}


def on_ranks(layout: ParallelConfig, *arguments, **settings) -> list[dict]:
    work = lambda world: observed(MixtureRun(world, layout, *arguments, **settings))  # noqa: E731
    return [work(SingleRankCommunicator())] if layout.ranks == 1 else run_threads(work, layout.ranks)


@cache
def alone(optimizer: str = "adamw") -> dict:
    return on_ranks(ParallelConfig(), optimizer)[0]


def require_same(found: list[dict], one: dict) -> None:
    """Each rank has what one process has; a pipeline's stages, and ranks that share out the optimizer, have it together."""
    seen = set()
    for step, expected in enumerate(one["gradients"]):
        assert set().union(*(each["gradients"][step] for each in found)) == expected.keys(), "a gradient that no rank has"
    for each in found:
        for what in ("losses", "norms"):
            torch.testing.assert_close(torch.stack(each[what]), torch.stack(one[what]), rtol=1e-9, atol=0)
        for here, there in zip(each["gradients"] + [each["weights"]], one["gradients"] + [one["weights"]], strict=True):
            for name, value in here.items():
                assert (value - there[name]).norm() <= 1e-9 * max(there[name].norm().item(), 1e-3), name
        for here, there in zip(each["roles"], one["roles"], strict=True):
            assert here.keys() == there.keys()
            assert all(abs(norm - there[role]) <= 1e-9 * max(there[role].item(), 1e-6) for role, norm in here.items())
        for here, there in zip(each["loads"], one["loads"], strict=True):
            assert all(torch.equal(load, there[block]) for block, load in here.items())
        seen |= each["weights"].keys()
    assert seen == one["weights"].keys()
