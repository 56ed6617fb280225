"""The whole trainer beside a plain loop over transformers' LLaMA: data, step, clipping, watching.

    python tests/benchmarks/trainer_speed.py                        float32 and bfloat16
    python tests/benchmarks/trainer_speed.py --dtypes bfloat16 --pairs 31 --device cuda

Ours is the trainer as a reader runs it, at the shape of step_speed.py: prepared text, packed rows with documents kept apart, half of
them with moved middles, the engine with its default callbacks, which logs every 10 steps. Theirs is nanoGPT's way: random windows of
one long array of tokens, the model of transformers, autocast, clipping, fused AdamW, and nothing watched. The optimizer's rule is the same.
"""

import argparse
import contextlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from side_by_side import Contender, Round, compare
from step_speed import BATCH, PEERS, SEQ

from shared.data.prepare import PrepareConfig, prepare
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel
from shared.optim.config import OptimizerConfig
from shared.optim.schedules import ScheduleConfig
from shared.trainer.config import DataConfig, TrainerConfig

STEPS = 10  # in a round, so that each holds one log
FOREVER = 10**6


def settings(folder: Path, device: str, dtype: str) -> TrainerConfig:
    return TrainerConfig(
        steps=FOREVER,
        data=DataConfig(prepare=PrepareConfig(), prepared=folder / "prepared", seq=SEQ, batch_size=BATCH, micro_batch_size=BATCH),
        model=replace(PEERS["llama"], vocab_size=4096),
        optimizer=OptimizerConfig(lr=1e-4, fused=True),
        schedule=ScheduleConfig(name="constant", steps=FOREVER, warmup_steps=0),
        precision=dtype,
        engine=EngineConfig(
            output=folder / f"run-{dtype}", device=device, trackers=["jsonl"], evaluate_every=0, checkpoint=CheckpointConfig(every=0)
        ),
    )


def prepare_ours(folder: str, device: str, dtype: str) -> Round:
    from shared.trainer.modes.pretrain import loaders
    from shared.trainer.run import build

    run = build(settings(Path(folder), device, dtype), Console(quiet=True))
    engine = run.engine
    loader, _ = loaders(run.config, run.text, run.strategy.mesh)
    engine.steps, engine.val_loader = FOREVER, None
    engine.stateful = engine.stateful_parts(loader)
    engine.callbacks.tell("on_start", engine)
    steps = engine.trained(loader)

    def one_round() -> dict[str, float]:
        began = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
            engine.after_step()
        if device == "cuda":
            torch.cuda.synchronize()
        return {"seconds": (time.perf_counter() - began) / STEPS}

    return one_round


def prepare_theirs(folder: str, device: str, dtype: str) -> Round:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokens = np.load(Path(folder) / "tokens.npy", mmap_mode="r")
    model = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model", attn_implementation="sdpa").to(device).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    casting = contextlib.nullcontext() if dtype == "float32" else torch.autocast(device, torch.bfloat16)

    def step() -> None:
        starts = np.random.randint(len(tokens) - SEQ - 1, size=BATCH)
        ids = torch.from_numpy(np.stack([tokens[start : start + SEQ + 1] for start in starts]).astype(np.int64)).to(device)
        with casting:
            logits = model(input_ids=ids[:, :-1]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def one_round() -> dict[str, float]:
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return {"seconds": (time.perf_counter() - began) / STEPS}

    return one_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    table = Table(
        title=f"Training, {arguments.pairs} pairs of {STEPS} steps, {arguments.device}, {torch.get_num_threads()} threads"
    )
    for column in ("dtype", "the trainer, tokens/s", "a plain loop, tokens/s", "ratio (95 %)"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        text = prepare(PrepareConfig(), Path(folder) / "prepared")
        np.save(Path(folder) / "tokens.npy", np.concatenate([text.training.document(number) for number in range(len(text.training))]))
        save_pretrained(TransformerModel(PEERS["llama"]), Path(folder) / "model")
        for dtype in arguments.dtypes:
            options = {"folder": folder, "device": arguments.device, "dtype": dtype}
            ours, theirs = Contender(prepare_ours, **options), Contender(prepare_theirs, **options)
            found = compare(ours, theirs, arguments.pairs, warmup=1)
            ours.close(), theirs.close()
            low, high = found.interval
            speeds = (f"{BATCH * SEQ / found.median(who):,.0f}" for who in ("ours", "theirs"))
            table.add_row(dtype, *speeds, f"{found.ratio:.2f} ({low:.2f} to {high:.2f})")
            print(dtype, *speeds, f"{found.ratio:.2f} ({low:.2f} to {high:.2f})", flush=True)  # long before the table is whole
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
