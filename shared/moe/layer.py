"""Chapter 09. Mixture-of-experts layer (MoE): router, dispatch, experts, combine, in place of a block's feed-forward layer.

    routing = router(x)    rows = tokens sorted by expert    y = sum over the k chosen experts of weight * expert(row)  [+ shared(x)]

Shazeer et al. 2017 ("Outrageously large neural networks"): many more weights at the arithmetic of k experts. The layer's two losses are
attached to its output (`add_auxiliary_loss`), so they have their gradient under recomputation, on a pipeline's stages and in ranks.
So are its counts of tokens: what is counted in a forward pass would be counted twice by a block that runs again for its backward pass.

**Tensor parallelism** cuts each expert, and the shared one, along its inner width, so each rank has a summand of every row's result:

    y = g( combine(rows of this rank, weights) + shared(x of this rank) )        x = f(what comes in), for router and experts

One all-reduce forward, one backward, as in a dense layer. The gradient of a choice's weight is <upstream, its row>. Rows are summands, so
each rank has only a summand of the router's gradients too. Router and experts therefore read x behind the same f, whose one all-reduce
completes the gradient of x, and the gradient of the router's matrix is partial over the ranks. The losses are the same on all n ranks; each
adds 1/n of them. With sequence parallelism f gathers the sequence, so each rank routes whole rows, with one process's losses and capacity.

**Context parallelism** routes each rank's positions. The balance loss multiplies probabilities by counts of the whole row: the counts,
which have no gradient, are added over the ranks (`context.over_row`), and the ranks' losses then add up to the row's.

Under `engine.compile` the layer runs as it is, between compiled parts: how many rows an expert has is data, not shape.

Left out on purpose: expert parallelism, which replaces `experts` and nothing else; a capacity where a row's positions are on several ranks,
of which none knows how many choices came before its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shared.course.errors import SettingError
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, add_auxiliary_loss, to_compute_dtype
from shared.model.feed_forward import build_feed_forward
from shared.moe.config import CAPACITY_OF_WHOLE_ROWS
from shared.moe.dispatch import combine, dispatch, drop_beyond_capacity, expert_capacity
from shared.moe.experts import Experts
from shared.moe.losses import balance_loss, balance_scale, z_loss
from shared.moe.router import Router, Routing
from shared.parallel.comm.communicator import Communicator


class MixtureLayer(nn.Module):
    """[batch, seq, D] -> [batch, seq, D].

    Attributes:
        load: [E] int64, how many of the valid tokens' choices each expert has had in backward passes since it was last set to None
            (`shared.moe.balancing`). Choices count whether they were dropped or not.
        losses: by name, what the layer's losses have added to the objective's sum over tokens since then, [] each.
        layer: the block's number.
        leave: adds up what the tensor ranks have of the result.
        copies: how many ranks compute the losses of the same tokens.
    """

    needs_context = knows_tensor_parallelism = True

    def __init__(self, config: ModelConfig, builders: Builders, layer: int):
        super().__init__()
        self.config, self.layer = config.experts, layer
        self.balance_scale = self.config.balance_coefficient * balance_scale(config, self.config)
        self.router = Router(config)
        self.experts = Experts(config)
        width = self.config.num_shared_experts * self.config.moe_intermediate_size
        shared = replace(config, experts=None, intermediate_size=width or None)
        self.shared_experts = build_feed_forward(shared, builders, layer) if width else None
        self.load: Tensor | None = None
        self.losses: dict[str, Tensor] = {}
        self.leave, self.copies = (lambda y: y), 1

    def over_ranks(self, group: Communicator, leave: Callable[[Tensor], Tensor]) -> None:
        """Compute with matrices that are cut over the ranks of a group. leave: [batch, seq, D] of each rank -> their sum."""
        self.leave, self.copies, self.router.weight.partial_over = leave, group.size, group

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        if torch.compiler.is_compiling():  # `disable` imports the compiler, which takes seconds: so it is no decorator
            return torch.compiler.disable(self.compute)(x, context)
        return self.compute(x, context)

    def compute(self, x: Tensor, context: AttentionContext) -> Tensor:
        routing = self.router(x)
        y = self.leave(self.mix(x, routing, context))
        return self.with_losses(y, routing, context) if torch.is_grad_enabled() else y

    def mix(self, x: Tensor, routing: Routing, context: AttentionContext) -> Tensor:
        """What the chosen experts make of each token, weighted, and the shared ones."""
        experts, (_, seq, k), tokens = routing.experts, routing.experts.shape, to_compute_dtype(x).flatten(0, 1)
        if self.config.capacity_factor is not None and self.training:
            if context.over_row is not None:
                raise SettingError(CAPACITY_OF_WHOLE_ROWS)
            capacity = expert_capacity(self.config.capacity_factor, seq, k, self.config.num_experts)
            experts = drop_beyond_capacity(experts, self.config.num_experts, capacity)
        order, counts = dispatch(experts.flatten(0, 1), self.config.num_experts)
        kept = len(order) if experts is routing.experts else int(counts.sum())
        rows = self.experts(tokens[order[:kept] // k], counts)
        shared = None if self.shared_experts is None else self.shared_experts(x)  # while rows come back from other ranks
        rows = self.experts.arrived(rows)
        if kept < len(order):
            rows = torch.cat([rows, rows.new_zeros(len(order) - kept, rows.shape[1])])
        y = combine(rows, order, routing.weights.flatten(0, 1)).view_as(x)
        return y if shared is None else y + shared

    def with_losses(self, y: Tensor, routing: Routing, context: AttentionContext) -> Tensor:
        """`y`, whose backward pass adds the gradients of the layer's losses and counts the load."""
        valid, scale, number = context.valid, context.loss_scale / self.copies, self.config.num_experts
        if valid is None:
            valid = torch.ones(routing.experts.shape[:2], dtype=torch.bool, device=y.device)
        probabilities, logits, losses = routing.probabilities, routing.logits, {}
        if valid.is_floating_point():  # each token's part of both losses is to be multiplied by its weight w
            weights, valid = valid.to(logits).unsqueeze(-1), valid > 0
            probabilities = probabilities * weights  # of which the balance loss is a sum
            logits = logits + (weights.sqrt() - 1) * logits.logsumexp(-1, keepdim=True)  # its logsumexp becomes sqrt(w) times itself
        if self.balance_scale:
            losses["balance_loss"] = self.balance_scale * balance_loss(probabilities, routing.experts, valid, context.over_row)
        if self.config.z_coefficient:
            losses["z_loss"] = self.config.z_coefficient * z_loss(logits, valid)
        for loss in losses.values():
            y = add_auxiliary_loss(y, loss, scale)
        values = {name: loss.detach() for name, loss in losses.items()}
        chosen = routing.experts.masked_fill(~valid.unsqueeze(-1), number).flatten()  # `experts[valid]` would wait for the device
        counts = chosen.new_zeros(number + 1).scatter_add_(0, chosen, torch.ones_like(chosen))[:number]
        return CountInBackward.apply(y, self, counts, values)


class CountInBackward(torch.autograd.Function):
    """The identity of x whose backward pass adds to a layer's load and losses: once a micro-batch, however often the forward pass runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: MixtureLayer, counts: Tensor, losses: dict[str, Tensor]) -> Tensor:
        ctx.layer, ctx.counts, ctx.losses = layer, counts, losses
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.layer.load = ctx.counts if ctx.layer.load is None else ctx.layer.load + ctx.counts
        for name, loss in ctx.losses.items():
            ctx.layer.losses[name] = ctx.layer.losses.get(name, 0) + loss
        return upstream, None, None, None


def mixture_layers(model: nn.Module) -> list[MixtureLayer]:
    """The mixture-of-experts layers of a model, or of a part of it, in order."""
    return [module for module in model.modules() if isinstance(module, MixtureLayer)]
