"""A whole pretraining run on one page: tokens, model, optimizer, schedule, training loop, evaluation and export, every wrapper inlined.

    python chapters/12_grpo/one_page.py chapters/12_grpo/laptop.yaml [key=value ...]

Read this first, then `train.py`: it does the same through an engine, with callbacks and a strategy for many ranks. What is called here are
functions that chapters teach: the model's forward pass, the packed loader, the loss, the optimizers' update rules. On one process the page
and the trainer end at the same weights, bit for bit, in float32 and in bfloat16 (a test holds it).

Left out on purpose, because each wraps the loop without changing its numbers: checkpoints and exact resume, anomaly detection, trackers,
dumps (chapter 04), float16's loss scale (05), many ranks (06), the report (12). Their keys in the YAML file are not read.
"""

import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import torch

from shared.data.fim import FillInMiddle
from shared.data.loader import EvaluationLoader, PackedLoader
from shared.model.chunked_loss import packed_next_token_objective
from shared.data.prepare import prepare
from shared.devices import pick_device
from shared.engine.metrics.gradient_norm import global_gradient_norm
from shared.model.hf.pretrained import save_pretrained
from shared.model.roles import role_of
from shared.model.transformer import TransformerModel
from shared.optim.adamw import adamw_step
from shared.optim.updater import clip_factor
from shared.optim.muon import muon_step
from shared.optim.schedules import learning_rate_factor
from shared.parallel.config import ParallelConfig
from shared.totals import add_totals, bits_per_byte
from shared.trainer.config import TrainerConfig
from shared.trainer.models import resolve_precision
from shared.trainer.sections import FIM_SLACK
from shared.trainer.settings import parse_words


def main(words: list[str]) -> TransformerModel:
    # Configuration. The trainer's own, so that one YAML file means the same run to both.
    config = parse_words(TrainerConfig, words)
    data, rule, schedule, output = config.data, config.optimizer, config.schedule, config.engine.output
    unknown = rule.no_decay or rule.to_adamw or data.prepare.sources[0].weight is not None
    if config.parallel != ParallelConfig() or rule.name not in ("adamw", "muon") or unknown or config.precision == "float16":
        sys.exit("This page knows one process, adamw and muon without patterns, sources without weights, float32, bfloat16: see train.py.")
    if config.start_from:
        sys.exit("This page begins with random weights: see train.py for start_from.")
    device = pick_device(config.engine.device)
    precision = resolve_precision(config.precision, device)
    autocast = torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()

    # Text -> clean documents -> tokens in memory-mapped shards. A second run finds them prepared.
    text = prepare(data.prepare, data.prepared)
    transform = None
    if data.fim.rate > 0:  # some documents become prefix, suffix, middle, so that the model also learns to fill gaps
        transform = FillInMiddle(data.fim, text.tokenizer.encode, text.tokenizer.decode, text.tokenizer.fim_tokens)
    training = PackedLoader(
        text.training, seq=data.seq, batch_size=data.batch_size, micro_batch_size=data.micro_batch_size, seed=config.seed,
        epochs=data.epochs, transform=transform, slack=FIM_SLACK if transform else 0, strategy=data.strategy,
    )  # fmt: skip
    held_out = EvaluationLoader(text.held_out, seq=data.seq, batch_size=data.micro_batch_size, limit=data.held_out_rows)
    held_out_bytes = held_out.byte_count(text.tokenizer.byte_lengths)

    # Model. Initial weights depend on the seed and on each parameter's name; this generator's stream is left to dropout.
    torch.manual_seed(config.seed)
    model = TransformerModel(replace(config.model, vocab_size=text.tokenizer.vocab_size), seed=config.seed).to(device)
    if config.engine.compile:
        model.compile()

    # Optimizer. Muon orthogonalises the matrices inside the model; embeddings, head, norms and biases take AdamW. What has two dimensions
    # decays towards zero; the weight of a norm belongs near 1, and a bias where the data wants it.
    adamw = {"betas": rule.betas or (0.9, 0.95), "eps": rule.eps, "fused": rule.fused}
    muon = {"momentum": rule.momentum, "nesterov": rule.nesterov, "scaling": rule.scaling, "steps": rule.newton_schulz_steps}
    muon["dtype"] = rule.newton_schulz_dtype or precision  # bfloat16 is exact enough for Newton-Schulz wherever it is fast
    groups = defaultdict(list)
    for name, parameter in model.named_parameters():
        by_muon = rule.name == "muon" and role_of(name, parameter) == "matrix"
        groups[by_muon, parameter.dim() >= 2].append(parameter)
    groups = [
        {"params": parameters, "step": muon_step if by_muon else adamw_step, "weight_decay": rule.weight_decay if decays else 0.0}
        | {"base_lr": rule.lr if by_muon or rule.adamw_lr is None else rule.adamw_lr}
        | (muon if by_muon else adamw)
        for (by_muon, decays), parameters in groups.items()
    ]
    state = defaultdict(dict)  # parameter -> its running means or its momentum

    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{millions:.1f} million parameters, {text.training.token_count / 1e6:.1f} million tokens, {precision} on {device}")
    since_log, tokens, began = [], 0, time.perf_counter()
    model.train()
    for step, microbatches in zip(range(1, config.steps + 1), training):
        # Gradient accumulation: backward runs on the sum of the losses, so the gradients of micro-batches simply add up, however many of
        # their tokens count. One graph is alive at a time.
        for parameter in model.parameters():
            parameter.grad = None
        parts = []
        for batch in microbatches:
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with autocast:  # weights stay float32; each matrix product rounds copies of them
                totals = packed_next_token_objective(model, batch)
            totals.loss_sum.backward()
            parts.append(add_totals([totals]))  # without its graph
        totals = add_totals(parts)

        # Clipping and the mean in one pass: the gradient is divided once, by all tokens that counted, and shortened where it is too long.
        grad_norm = global_gradient_norm(parameter.grad for parameter in model.parameters()) / totals.token_count
        factor = clip_factor(grad_norm, config.max_grad_norm) if config.max_grad_norm else torch.ones_like(grad_norm)
        factor /= totals.token_count
        for parameter in model.parameters():
            parameter.grad.mul_(factor)

        # The update. The schedule is a function of the step's number alone, so nothing about it needs saving.
        warmed = learning_rate_factor(
            step, schedule.name, schedule.warmup_steps, config.steps, schedule.decay_steps, schedule.minimum
        )
        with torch.no_grad():
            for group in groups:
                group["lr"] = group["base_lr"] * warmed
                group["step"](group, state)

        # Evaluation, and a line to watch. Reading a number waits for the device, so it happens only in steps that are logged.
        since_log.append(totals)
        tokens += data.batch_size * data.seq
        due = step == config.steps or (config.engine.evaluate_every and step % config.engine.evaluate_every == 0)
        if step == 1 or due or step % config.engine.log_every == 0:
            speed, loss = tokens / (time.perf_counter() - began), add_totals(since_log).mean_loss
            line = f"step {step:5}  loss {loss:.3f}  grad norm {grad_norm:.3f}  lr {groups[0]['lr']:.1e}  {speed:,.0f} tokens/s"
            if due:
                model.eval()
                with torch.no_grad(), autocast:
                    batches = ({name: tensor.to(device) for name, tensor in batch.items()} for batch in held_out)
                    found = add_totals(packed_next_token_objective(model, batch) for batch in batches)
                model.train()
                line += f"  held out: loss {found.mean_loss:.3f}, {bits_per_byte(found.loss_sum, held_out_bytes):.3f} bits per byte"
            print(line, flush=True)
            since_log, tokens, began = [], 0, time.perf_counter()

    # The result, as transformers reads it.
    save_pretrained(model, output / "one_page")
    text.tokenizer.save(output / "one_page" / "tokenizer.json")
    print(f"The model: {output / 'one_page'}")
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
