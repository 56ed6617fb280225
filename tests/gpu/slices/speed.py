"""The 124-million model's tokens per second and MFU, eager and compiled, beside a plain loop in nanoGPT's manner and transformers.

All contenders have the same weights, tokens, autocast (bfloat16) and fused AdamW, and their first losses must agree. They take turns in one
process: each pair is a round of ours and a round of theirs, and the median of the pairs' ratios stands with its interval of 95 %. A ratio
above 1 says that ours is faster.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_machine import Machine
from gpu_models import M124, TINY, batch_of, moved, step_of
from gpu_rows import Row
from plain_llama import PlainLlama
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from side_by_side import Comparison  # noqa: E402

from shared.course.errors import CourseError  # noqa: E402
from shared.engine.metrics.flops import mfu, model_flops_per_token, peak_flops  # noqa: E402
from shared.model.config import ModelConfig  # noqa: E402
from shared.model.hf.pretrained import save_pretrained  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402

ADAMW = OptimizerConfig("adamw", lr=1e-4, weight_decay=0.1, fused=True)
Round = Callable[[], float]  # does one step and returns its loss, not yet on the host
LOSSES = 2e-3  # relative, of the first step: two orders of rounding to bfloat16


def run(machine: Machine, small: bool) -> Iterator[Row]:
    shape, pairs = ((TINY, 2, 32), 6) if small else ((M124, 8, 1024), 15)
    peers = {"plain loop": plain_round} | ({"transformers": transformers_round} if importlib.util.find_spec("transformers") else {})
    for way in ("eager",) if small else ("eager", "compiled"):
        torch.compiler.reset()
        backend = "inductor" if way == "compiled" else None
        ours = our_round(machine, *shape, backend)
        first = float(ours())
        for name, make in peers.items():
            theirs = make(machine, *shape, backend)
            yield against(machine, f"{way}, beside {name}", ours, theirs, first, pairs, shape)
            del theirs
            machine.free()
        del ours
        machine.free()
    if "transformers" not in peers:
        yield Row("beside transformers", {}, None, "not installed")
    others = {"packed rows, as the trainer's": {"packed": True}, "Muon": {"optimizer": OptimizerConfig("muon", lr=1e-3)}}
    for name, options in others.items():
        one = our_round(machine, *shape, None, **options)
        one(), one()
        seconds = sorted(machine.wall_seconds(one) for _ in range(1 if small else 10))
        yield Row(f"eager, {name}", speed_of(machine, seconds[len(seconds) // 2], *shape))
        del one
        machine.free()


def against(machine: Machine, what: str, ours: Round, theirs: Round, first: float, pairs: int, shape: tuple[ModelConfig, int, int]) -> Row:
    """first: the loss of our first step, before which ours and theirs had the same weights."""
    their_first = float(theirs())
    for each in (ours, theirs) * 2:
        each()
    found = Comparison([], [])
    for number in range(pairs):
        for contender, kept in ((ours, found.ours), (theirs, found.theirs))[:: 1 if number % 2 else -1]:
            kept.append({"seconds": machine.wall_seconds(contender)})
    figures = speed_of(machine, found.median("ours"), *shape)
    figures |= {f"theirs, {name}": value for name, value in speed_of(machine, found.median("theirs"), *shape).items()}
    low, high = found.interval
    figures |= {"ratio": found.ratio, "interval": f"{low:.2f} to {high:.2f}"} if machine.is_gpu else {"ratio": None, "interval": None}
    agree = abs(first - their_first) <= LOSSES * their_first
    return Row(what, figures, agree, f"the first losses, {first:.4f} and {their_first:.4f}, agree to {LOSSES:g}; {pairs} pairs of a step")


def speed_of(machine: Machine, seconds: float, config: ModelConfig, rows: int, seq: int) -> dict[str, float | None]:
    if not machine.is_gpu:
        return {"tokens/s": None, "MFU": None}
    tokens = rows * seq
    try:
        peak = peak_flops(machine.device, torch.bfloat16)
    except CourseError:  # a card that the table of peaks does not hold
        return {"tokens/s": tokens / seconds, "MFU": None}
    return {"tokens/s": tokens / seconds, "MFU": mfu(model_flops_per_token(config, seq), tokens / seconds, peak)}


def our_round(
    machine: Machine, config: ModelConfig, rows: int, seq: int, backend: str | None, packed: bool = False, optimizer=ADAMW
) -> Round:
    step = step_of(config, machine.device, "bfloat16", optimizer, compiled=backend)
    batch = batch_to(machine, config, rows, seq, packed)

    def one() -> float:
        totals = step(batch)
        return totals.loss_sum / totals.token_count

    return one


def plain_round(machine: Machine, config: ModelConfig, rows: int, seq: int, backend: str | None) -> Round:
    """nanoGPT's loop: all logits at once, the mean loss, clipping by PyTorch's function, fused AdamW."""
    model = PlainLlama(config).to(machine.device)
    model.take(TransformerModel(config).state_dict())
    return peer_round(machine, config, rows, seq, model, backend, lambda ids: model(ids))


def transformers_round(machine: Machine, config: ModelConfig, rows: int, seq: int, backend: str | None) -> Round:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(TransformerModel(config), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    model.config.use_cache = False
    model.to(machine.device).train()
    return peer_round(machine, config, rows, seq, model, backend, lambda ids: model(input_ids=ids).logits)


def peer_round(machine: Machine, config: ModelConfig, rows: int, seq: int, model, backend, logits_of: Callable[[Tensor], Tensor]) -> Round:
    batch = batch_to(machine, config, rows, seq)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    if backend:
        model.compile(backend=backend)

    def one() -> float:
        with torch.autocast(machine.device.type, torch.bfloat16):
            logits = logits_of(batch["input_ids"])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return one


def batch_to(machine: Machine, config: ModelConfig, rows: int, seq: int, packed: bool = False) -> dict[str, Tensor]:
    return moved(batch_of(config, rows, seq, packed=packed), machine.device)
