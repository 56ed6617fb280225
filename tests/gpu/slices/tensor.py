"""Chapter 07 in a world of one rank over NCCL: operators, vocabulary-parallel scores, merged attention and cut models, beside one process.

With one rank a sum over ranks is the tensor itself, so results and gradients must equal one process's, computed in float64 on the CPU.
What is shown is that every collective is one that NCCL takes, in the dtypes and on the streams in which a step makes it, forward and
backward. On a CPU gloo takes NCCL's place.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_machine import Machine, tf32
from gpu_models import TINY, batch_of, distance, moved
from gpu_rows import Row
from slices.attention import on
from slices.nccl import WorldOfOne, world_of_one
from torch import Tensor

from shared.loop import accumulate_gradients
from shared.model.attention import eager_attention
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.embedding import TargetScores
from shared.model.masks import Causal, Documents, Mask, Window, to_attention_mask
from shared.model.transformer import TransformerModel
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import ParallelConfig
from shared.parallel.context.blocks import Part, attend_block, block_gradients, merge_attention
from shared.parallel.mesh import Mesh
from shared.parallel.processes.torchrun import leave_world
from shared.parallel.tensor.axis import Cutter
from shared.parallel.tensor.layers import VocabularyScores
from shared.parallel.tensor.operators import (
    f_and_g,
    gather_sequence,
    join_sequence,
    join_vocabulary,
    scatter_sequence,
    split_sequence,
)
from shared.parallel.tensor.on_torch import DTensorScores, as_dtensor, parallelize_by_torch

SCORES = {"float32": 1e-5, "bfloat16": 2e-2}  # of losses and of their gradient, which is rounded to the logits' dtype
ATTENTION = {"float32": 1e-5, "bfloat16": 3e-2}
MODELS = {"float32": 1e-4, "bfloat16": 5e-2}  # every gradient, of its norm
CONFIG = replace(TINY, hidden_size=128, intermediate_size=384, qk_norm=True)


def run(machine: Machine, small: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        world = world_of_one(machine, Path(folder))
        try:
            mesh = Mesh(ParallelConfig(), world)
            yield from operators(mesh.tp, machine)
            yield from scores(mesh.tp, machine, *((64, 96) if small else (4096, 50257)))
            yield from merged_attention(machine, *((2, 4, 32, 16) if small else (2, 8, 1024, 64)))
            yield from models(world, machine, 16 if small else 64)
        finally:
            leave_world(world, "has finished")
            dist.destroy_process_group()


def operators(group: Communicator, machine: Machine) -> Iterator[Row]:
    """Result and gradient of each operator are the same bits as what goes in."""
    f, g = f_and_g(group)
    on_sequence = {each.__name__: partial(each, group=group) for each in (gather_sequence, scatter_sequence, split_sequence, join_sequence)}
    each = {"f": f, "g": g, **on_sequence, "join_vocabulary": partial(join_vocabulary, sizes=[24], group=group)}
    for name, operator in each.items():
        held = []
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(2, 8, 24, device=machine.device, dtype=dtype, requires_grad=True)
            upstream = torch.randn_like(x).transpose(0, 1).contiguous().transpose(0, 1)  # as gradients come, which need not be contiguous
            y = operator(x)
            y.backward(upstream)
            held += [torch.equal(y, x), torch.equal(x.grad, upstream), y.dtype == dtype]
        yield Row(f"{name}, forward and backward, float32 and bfloat16", {}, all(held))


def scores(group: Communicator, machine: Machine, rows: int, vocabulary: int) -> Iterator[Row]:
    """Ours and `loss_parallel`, beside one process's scores in float64 of the same rounded logits."""
    generator = torch.Generator().manual_seed(0)
    logits = 10 * torch.randn(rows, vocabulary, generator=generator)
    logits[1] = 300.0  # exponentials overflow without the maximum
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[::5] = -100
    mesh = dist.DeviceMesh.from_group(group.torch_group, machine.device.type, mesh_dim_names=("tp",))
    wrapped = partial(as_dtensor, device_mesh=mesh, placements=(dist.tensor.Shard(1),), shape=logits.shape, stride=logits.stride())
    makers: dict[str, Callable[[Tensor, Tensor], TargetScores]] = {
        "VocabularyScores": lambda logits, targets: VocabularyScores(logits, targets, 0, group),
        "loss_parallel": lambda logits, targets: DTensorScores(logits, targets, wrapped),
    }
    for precision, tolerance in SCORES.items():
        rounded = logits.to(getattr(torch, precision))
        one = TargetScores(rounded.double(), targets)
        expected = {"losses": one.token_losses(), "gradient": one.gradient()}
        for name, make in makers.items():
            found = make(rounded.to(machine.device), targets.to(machine.device))
            numbers = {"losses": found.token_losses(), "gradient": found.gradient()}
            far, where = distance({key: tensor.double().cpu() for key, tensor in numbers.items()}, expected)
            same = int(found.count_correct()) == int(one.count_correct()) and int(found.cross_entropy()[1]) == int(one.counted.sum())
            yield Row(f"{name}, {precision}", {"difference": far, "worst": where}, same and far <= tolerance, f"at most {tolerance:g}")
            machine.free()


def merged_attention(machine: Machine, rows: int, heads: int, seq: int, size: int) -> Iterator[Row]:
    """Attention to three parts of the keys, merged, and its backward pass by parts, beside attention written out in float64."""
    documents = (torch.arange(seq) // (seq // 3 + 1)).repeat(rows, 1)
    rules = {"causal": Causal(), "documents": Causal() & Documents(documents), "window": Causal() & Window(seq // 4)}
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, heads, seq, size), *[(rows, heads // 2, seq, size)] * 2, (rows, heads, seq, size)]
    for precision, tolerance in ATTENTION.items():
        tensors = [torch.randn(*shape, generator=generator).to(getattr(torch, precision)) for shape in shapes]
        for name, rule in rules.items():
            *leaves, upstream = [tensor.double().requires_grad_() for tensor in tensors]
            positions = torch.arange(seq)
            one = eager_attention(*leaves, to_attention_mask(rule, positions, positions, None, sdpa=False), size**-0.5, 0.0)
            expected = [one.detach(), *torch.autograd.grad(one, leaves, upstream.detach())]
            found = by_parts(rule, [tensor.to(machine.device) for tensor in tensors], machine.device)
            names = ("out", "queries", "keys", "values")
            far, where = distance(dict(zip(names, found, strict=True)), dict(zip(names, expected, strict=True)))
            yield Row(f"merge of three parts, {name}, {precision}", {"difference": far, "worst": where}, far <= tolerance, f"{tolerance:g}")
            machine.free()


def by_parts(rule: Mask, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    queries, keys, values, upstream = tensors
    rule = on(rule, device)
    scale, positions = queries.shape[-1] ** -0.5, torch.arange(queries.shape[2], device=device)
    cuts = positions.tensor_split([len(positions) // 3, len(positions) // 2])
    masks = [to_attention_mask(rule, positions, cut, None, sdpa=True, in_order=False) for cut in cuts]
    parts = [attend_block(queries, keys[:, :, cut], values[:, :, cut], mask, scale) for cut, mask in zip(cuts, masks, strict=True)]
    whole = parts[0]
    for part in parts[1:]:
        whole = Part(*merge_attention(*whole, *part))
    whole = whole._replace(out=whole.out.to(upstream.dtype))
    gradients = [
        block_gradients(upstream, queries, keys[:, :, cut], values[:, :, cut], whole, mask, scale)
        for cut, mask in zip(cuts, masks, strict=True)
    ]
    of_queries, of_keys, of_values = zip(*gradients, strict=True)
    found = [whole.out, sum(each.double() for each in of_queries), torch.cat(of_keys, dim=2), torch.cat(of_values, dim=2)]
    return [tensor.double().cpu() for tensor in found]


def models(world: WorldOfOne, machine: Machine, seq: int) -> Iterator[Row]:
    """Every gradient of a model that was cut, on both backends, with and without sequence parallelism."""
    batch = batch_of(CONFIG, 4, seq, packed=True)
    plain = TransformerModel(CONFIG).double()
    accumulate_gradients(plain, [batch], packed_next_token_objective)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for precision, tolerance in MODELS.items():
        for backend in ("course", "torch"):
            for by_sequence in (False, True):
                mesh = Mesh(ParallelConfig(), world)
                mesh.config = ParallelConfig(backend=backend, tensor_parallel=2, sequence_parallel=by_sequence)  # as if there were another
                model = TransformerModel(CONFIG).to(machine.device)
                if backend == "torch":
                    parallelize_by_torch(model, mesh)
                else:
                    Cutter(mesh, model.config.num_key_value_heads).cut_model(model)
                before = sum(world.trace.calls().values())
                with tf32(False):
                    objective = autocast_objective(packed_next_token_objective, precision)
                    accumulate_gradients(model, [moved(batch, machine.device)], objective)
                found = {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}
                far, where = distance(found, expected)
                figures = {"difference": far, "worst": where, "collectives": sum(world.trace.calls().values()) - before}
                what = f"{backend}, {'tensor and sequence' if by_sequence else 'tensor'} parallelism, {precision}"
                yield Row(what, figures, far <= tolerance, f"every gradient to {tolerance:g}")
