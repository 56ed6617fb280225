"""Chapter 09. A mixture-of-experts layer spread over ranks, from scratch: sort, send, sort again, and the same way back.

    choices of tokens --sort by expert--> rows --all-to-all--> rows of this rank's experts, by source --sort by expert--> experts
    y of tokens <--weighted sum-- rows in order of choices <--all-to-all-- rows by source <--

Sorted by expert, rows are sorted by rank too, as rank r holds experts r * E / n and the following. The exchange of rows is linear: its
backward pass is the same exchange with the two lists of numbers swapped.

Who adds whose gradients: an expert has had the rows of its whole group, so its gradient lacks those of its replicas alone. The router has
had this rank's tokens, so its gradient lacks those of all other ranks. The loss is divided by all tokens before, so all are sums.

(Shazeer et al. 2017; Lepikhin et al. 2020, section 3; balance: Fedus et al. 2021, equation 4; z: Zoph et al. 2022, equation 5; bias: Wang
et al. 2024.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EXPERTS = ("experts.gate_proj.weight", "experts.up_proj.weight", "experts.down_proj.weight")


def choose(x: Tensor, weight: Tensor, bias: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [..., E], weights [..., k] and experts [..., k]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        logits = F.linear(x.to(dtype), weight.to(dtype))
        probabilities = logits.softmax(dim=-1)
        scores = probabilities.detach() + bias.to(dtype)
        experts = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]  # topk may swap equals
        weights = probabilities.gather(-1, experts)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights, experts


def sort_choices(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The numbers of the choices [T * k] in the order of their experts, and how many choices each expert has."""
    flat = experts.flatten()
    if len(outside := flat[(flat < 0) | (flat >= num_experts)]):
        raise ValueError(f"A token chose expert {int(outside[0])} of {num_experts}.")
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts)


def loop_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight.unbind())])  # no rows: a gradient of zero


def batched_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    expert = torch.arange(len(counts)).repeat_interleave(counts)
    place = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[expert]
    padded = rows.new_zeros(len(counts), int(counts.max()), rows.shape[1]).index_put((expert, place), rows)
    return torch.bmm(padded, weight.transpose(1, 2))[expert, place]


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))  # the ends of the experts' rows


PRODUCTS = {"loop": loop_product, "batched": batched_product, "grouped": grouped_product}


def run_experts(rows, counts, gate, up, down, way):
    product = PRODUCTS[way]
    return product(F.silu(product(rows, gate, counts)) * product(rows, up, counts), down, counts)


def auxiliary_losses(logits, experts, valid):
    probabilities, (*_, k) = logits.softmax(dim=-1), experts.shape
    tokens = valid.sum(dim=1)  # [B]
    mass = (probabilities * valid.unsqueeze(-1)).sum(dim=1)  # [B, E], P * tokens
    chosen = F.one_hot(experts, logits.shape[-1]).sum(dim=2)  # [B, S, E]
    counts = (chosen * valid.unsqueeze(-1)).sum(dim=1)  # [B, E], f * tokens
    balance = ((counts * mass).sum(dim=1) / tokens.clamp(min=1)).sum() * logits.shape[-1] / k
    return balance, (logits.logsumexp(dim=-1).square() * valid).sum()


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group) -> Tensor:
        ctx.numbers = received, sent, group  # of this call: the layer may be called again before the backward pass
        return move(rows, sent, received, group)

    @staticmethod
    def backward(ctx, upstream: Tensor):
        return move(upstream, *ctx.numbers), None, None, None


def move(rows: Tensor, sent: list[int], received: list[int], group) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    group.all_to_all(list(result.split(received)), list(rows.contiguous().split(sent)))
    return result


class Layer:
    """This rank's part.

    weights: name -> its part. load: [E], choices of its own tokens that count, in calls that had their backward pass.
    """

    def __init__(self, weights, k, renormalize, group, replicas):
        self.experts = len(weights["router.weight"])
        if self.experts % group.size:
            raise ValueError(f"{self.experts} experts cannot be shared out over {group.size} ranks: take a multiple.")
        if not 1 <= k <= self.experts:
            raise ValueError(f"k is {k}: give 1 to {self.experts}, the number of experts.")
        self.k, self.renormalize, self.group, self.replicas = k, renormalize, group, replicas
        share = self.experts // group.size
        own = slice(group.rank * share, (group.rank + 1) * share)
        parts = {name: weight[own] if name in EXPERTS else weight for name, weight in weights.items()}
        self.weights = {name: part.detach().clone() for name, part in parts.items()}  # a slice would keep the whole in memory
        self.bias = self.weights["router.bias"]
        self.trained = {name: weight.requires_grad_() for name, weight in self.weights.items() if name != "router.bias"}
        self.load = torch.zeros(self.experts, dtype=torch.int64)

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        router = self.weights["router.weight"]
        if x.shape[-1] != router.shape[1]:
            raise ValueError(f"The tokens are {x.shape[-1]} wide, and the layer {router.shape[1]}.")
        if x.shape[:2] != valid.shape:
            raise ValueError(f"The tokens have shape {list(x.shape)}, and `valid` {list(valid.shape)}.")
        logits, weights, experts = choose(x, router, self.bias, self.k, self.renormalize)
        order, counts = sort_choices(experts, self.experts)
        rows = self.run(x.flatten(0, 1)[order // self.k], counts)
        choices = rows[order.argsort()].view(*experts.shape, x.shape[-1])
        y = (choices * weights.unsqueeze(-1)).sum(dim=2).to(x.dtype)
        if y.requires_grad:
            load = torch.bincount(experts[valid].flatten(), minlength=self.experts)
            y.register_hook(lambda gradient: self.count(load))  # a block may call this twice, and runs one backward pass
        return y, *auxiliary_losses(logits, experts, valid)

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts, wherever they are, make of rows sorted by expert."""
        ranks = self.group.size
        sent, theirs = counts.view(ranks, -1), torch.empty_like(counts).view(ranks, -1)  # [ranks, this rank's experts]
        self.group.all_to_all(list(theirs), list(sent))
        sent, received = sent.sum(dim=1).tolist(), theirs.sum(dim=1).tolist()
        arrived = Exchange.apply(rows, sent, received, self.group)
        expert = torch.arange(theirs.shape[1]).repeat(ranks).repeat_interleave(theirs.flatten())  # they lie by source, then by expert
        order = expert.argsort(stable=True)
        made = run_experts(arrived[order], theirs.sum(dim=0), *(self.weights[name] for name in EXPERTS), "loop")
        return Exchange.apply(made[order.argsort()], received, sent, self.group)

    def count(self, load: Tensor) -> None:
        self.load = self.load + load

    def add_up(self, tensor: Tensor, group: bool = True, replicas: bool = True) -> Tensor:
        if group:
            self.group.all_reduce(tensor)
        if replicas:
            self.replicas.all_reduce(tensor)
        return tensor

    def step(self, batches, loss, balance: float, z: float) -> Tensor:
        tokens = self.add_up(torch.tensor([sum(int(valid.sum()) for _, _, valid in batches)]))
        if tokens == 0:
            raise ValueError(f"Of {len(batches)} micro-batches 0 tokens count on any rank, so there is nothing to divide by.")
        total = torch.zeros(1, dtype=torch.float64)
        for weight in self.trained.values():
            weight.grad = None
        for x, targets, valid in batches:
            y, balance_loss, z_loss = self.forward(x, valid)
            mean = (loss(y, targets, valid) + balance * balance_loss + z * z_loss) / tokens[0]
            mean.backward()
            total += mean.detach()
        for name, weight in self.trained.items():
            self.add_up(weight.grad, group=name not in EXPERTS)
        return self.add_up(total)[0]

    def gradient_norm(self) -> Tensor:
        own = sum(self.trained[name].grad.square().sum() for name in EXPERTS).reshape(1)
        return (self.add_up(own, replicas=False)[0] + self.trained["router.weight"].grad.square().sum()).sqrt()

    def update_bias(self, rate: float) -> Tensor:
        load, self.load = self.add_up(self.load), torch.zeros_like(self.load)
        self.bias += rate * torch.sign(load.double().mean() - load)
        return load


def route(x, weight, bias, k, renormalize):
    return choose(x, weight, bias, k, renormalize)[1:]


def dispatch(x, experts, num_experts):
    order, counts = sort_choices(experts, num_experts)
    return x[order // experts.shape[1]], counts


def make_layer(weights, k, renormalize, group, replicas):
    return Layer(weights, k, renormalize, group, replicas)


def state(layer):
    return layer.weights


def forward(layer, x, valid):
    return layer.forward(x, valid)


def exchange(rows, sent, received, group):
    if not len(sent) == len(received) == group.size:
        raise ValueError(f"{len(sent)} numbers to send and {len(received)} to receive, for {group.size} ranks.")
    if sum(sent) != len(rows):
        raise ValueError(f"{sum(sent)} rows are to be sent, and there are {len(rows)}.")
    return Exchange.apply(rows, sent, received, group)


def step(layer, batches, loss, balance, z):
    return layer.step(batches, loss, balance, z)


def gradients(layer):
    return {name: weight.grad for name, weight in layer.trained.items()}


def gradient_norm(layer):
    return layer.gradient_norm()


def update_bias(layer, rate):
    return layer.update_bias(rate)
