"""The oracle of build 09: its one process has the outputs, gradients and losses of transformers' Mixtral and OLMoE blocks, and so has the
solution. test_09_build_exchange.py compares ranks."""

import pytest
import torch
from transformers import MixtralConfig, OlmoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from shared.course import assignments, build_check
from shared.course.stubs import BodyFile
from shared.parallel.comm.communicator import SingleRankCommunicator

EXPERTS, WIDTH, INNER, CHOSEN = 6, 5, 7, 2
NEAR = {"rtol": 1e-5, "atol": 1e-6}  # transformers' softmax is in float32, whatever the dtype of the tokens


def pieces_of_the_build():
    return build_check.read_module(assignments.builds()["09.build"].folder / "pieces.py")


def solution():
    build = assignments.builds()["09.build"]
    return build_check.load(BodyFile.read(build.solution_file), build.adapters)


def block_of_transformers(renormalize: bool, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_experts_per_tok": CHOSEN, "experts_implementation": "eager"}
    if renormalize:
        block = MixtralSparseMoeBlock(MixtralConfig(num_local_experts=EXPERTS, **sizes))
    else:
        block = OlmoeSparseMoeBlock(OlmoeConfig(num_experts=EXPERTS, norm_topk_prob=False, **sizes))
    block.double().load_state_dict({
        "gate.weight": weights["router.weight"],
        "experts.gate_up_proj": torch.cat([weights["experts.gate_proj.weight"], weights["experts.up_proj.weight"]], dim=1),
        "experts.down_proj": weights["experts.down_proj.weight"],
    })  # fmt: skip
    return block


@pytest.mark.parametrize("renormalize", [True, False], ids=["Mixtral", "OLMoE"])
def test_one_process_and_the_solution_are_transformers_blocks(renormalize):
    pieces, adapters = pieces_of_the_build(), solution()
    weights = pieces.weights_of(EXPERTS, WIDTH, INNER)
    [(x, _, valid)] = pieces.batches_of([(3, 4)], width=WIDTH)
    block, cotangent = block_of_transformers(renormalize, weights), pieces.randn(3, 4, WIDTH, seed=9)
    leaf = x.clone().requires_grad_()
    y = block(leaf)
    given = [leaf, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    of_x, router, gate_up, down = torch.autograd.grad(y, given, cotangent)
    whole = pieces.Whole(weights, CHOSEN, renormalize)
    alone = SingleRankCommunicator(), SingleRankCommunicator()
    layer = adapters.make_layer(weights, CHOSEN, renormalize, *alone)
    for forward, held in ((whole.forward, whole.weights), (lambda *call: adapters.forward(layer, *call), adapters.state(layer))):
        leaf = x.clone().requires_grad_()
        own, *_ = forward(leaf, valid)
        found = torch.autograd.grad(own, [leaf, *(held[name] for name in pieces.TRAINED)], cotangent)
        torch.testing.assert_close((own, *found), (y, of_x, router, *gate_up.chunk(2, dim=1), down), **NEAR)


def test_the_losses_are_transformers_by_row():
    """Theirs are of a whole batch, and not divided by k: so they get one row at a time, of the tokens that count."""
    pieces, adapters = pieces_of_the_build(), solution()
    weights = pieces.weights_of(EXPERTS, WIDTH, INNER)
    [(x, _, valid)] = pieces.batches_of([(3, 4)], width=WIDTH)
    logits, probabilities = pieces.probabilities_of(x, weights["router.weight"])
    experts = pieces.best(probabilities.flatten(0, 1), weights["router.bias"], CHOSEN).view(3, 4, CHOSEN)
    rows = [logits[row, valid[row]] for row in range(3)]
    balance = sum(len(row) * load_balancing_loss_func((row,), EXPERTS, CHOSEN) / CHOSEN for row in rows)
    z = sum(len(row) * router_z_loss_func(row.unsqueeze(0)) for row in rows)
    for losses in (pieces.losses_by_hand(logits, probabilities, experts, valid), adapters.auxiliary_losses(logits, experts, valid)):
        torch.testing.assert_close(losses, (balance.double(), z), **NEAR)  # their shares are in float32
