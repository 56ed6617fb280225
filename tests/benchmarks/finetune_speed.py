"""A step of supervised fine-tuning beside TRL's SFTTrainer, and a LoRA step beside peft's, on the same base and the same batches.

    OMP_NUM_THREADS=1 python tests/benchmarks/finetune_speed.py --what sft       all weights, loss on the answers
    OMP_NUM_THREADS=1 python tests/benchmarks/finetune_speed.py --what lora      rank 16 on every linear layer of the blocks
    OMP_NUM_THREADS=1 python tests/benchmarks/finetune_speed.py --what sft --profile     where the time of a step goes, ours and theirs

Both begin with the same weights (ours are saved and loaded by transformers), and see the same rows of 256 tokens; the last 40 % of each are
an answer. Ours is chapter 01's `train_step` with the objective of mode sft, clipping at 1 and fused AdamW. TRL's step is timed by its own
callbacks, from the beginning of a step to its end, without evaluation, logging or saving. peft's model is trained by a plain loop.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from side_by_side import Contender, Round, compare

from shared.data.tokenizer import TextTokenizer
from shared.devices import keep_freed_memory
from shared.finetune.adapters import attach_adapter
from shared.finetune.answer_objective import answer_objective
from shared.finetune.config import AdapterConfig
from shared.loop import accumulate_gradients, keep_totals, train_step
from shared.loss import IGNORED
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.optim.updater import Update

SEQ, BATCH, VOCAB, ANSWER = 256, 8, 4096, 0.4
MODELS = {
    "sft": ModelConfig(vocab_size=VOCAB, hidden_size=256, num_hidden_layers=5, num_attention_heads=4, intermediate_size=688,
                       max_position_embeddings=SEQ, tie_word_embeddings=True),
    "lora": ModelConfig(vocab_size=VOCAB, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1024,
                        max_position_embeddings=SEQ, tie_word_embeddings=True),
}  # fmt: skip
RANK, ALPHA = 16, 32.0
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 2  # in a round


def rows() -> Iterator[torch.Tensor]:
    """The same random rows [BATCH, SEQ] for everyone."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(VOCAB, (BATCH, SEQ), generator=generator)


def batch_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs and targets of SEQ - 1 positions, as packed rows of one example each."""
    targets = ids[:, 1:].clone()
    targets[:, : round((1 - ANSWER) * SEQ) - 1] = IGNORED
    positions = torch.arange(SEQ - 1).expand(BATCH, -1)
    return {"input_ids": ids[:, :-1].contiguous(), "targets": targets, "positions": positions, "documents": torch.zeros_like(positions)}


def timed(step: Callable[[dict[str, torch.Tensor]], float]) -> Round:
    data = rows()

    def one_round() -> dict[str, float]:
        chosen = [batch_of(next(data)) for _ in range(STEPS)]
        began, computed = time.perf_counter(), time.process_time()
        losses = [step(batch) for batch in chosen]
        figures = {"seconds": (time.perf_counter() - began) / STEPS, "cpu": (time.process_time() - computed) / STEPS}
        return figures | {"loss": float(losses[0])}

    return one_round


def our_step(folder: str, adapted: bool) -> Callable[[dict[str, torch.Tensor]], float]:
    keep_freed_memory()
    torch.set_num_threads(1)
    model = load_pretrained(folder)
    if adapted:
        attach_adapter(model, AdapterConfig(rank=RANK, alpha=ALPHA, targets=tuple(LAYERS)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    parts = answer_objective, accumulate_gradients, keep_totals, Update(1.0)
    return lambda batch: train_step(model, optimizer, [batch], *parts).mean_loss


def prepare_ours(folder: str, adapted: bool) -> Round:
    return timed(our_step(folder, adapted))


def peft_step(folder: str) -> Callable[[dict[str, torch.Tensor]], float]:
    import transformers
    from peft import LoraConfig, get_peft_model

    keep_freed_memory()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    base.config.use_cache = False
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LAYERS, task_type="CAUSAL_LM")).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> float:
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.item()

    return step


def prepare_peft(folder: str) -> Round:
    return timed(peft_step(folder))


def prepare_trl(folder: str) -> Round:
    """Rounds of STEPS steps of TRL's trainer, after one that is not counted."""
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    keep_freed_memory()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    data, read = rows(), round((1 - ANSWER) * SEQ)
    state: dict[str, Any] = {"model": transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")}

    class Timer(transformers.TrainerCallback):
        def on_step_begin(self, arguments, progress, control, **more):
            self.began = self.began if progress.global_step > 1 else (time.perf_counter(), time.process_time())

        began = None

        def on_step_end(self, arguments, progress, control, **more):
            self.ended = time.perf_counter(), time.process_time()

    def one_round() -> dict[str, float]:
        drawn = [row.tolist() for _ in range(STEPS + 1) for row in next(data)]
        examples = [{"input_ids": row, "labels": [IGNORED] * read + row[read:]} for row in drawn]
        with tempfile.TemporaryDirectory() as output:
            config = SFTConfig(
                output, per_device_train_batch_size=BATCH, max_length=SEQ, max_steps=STEPS + 1, logging_steps=10**6, save_strategy="no",
                report_to=[], use_cpu=True, bf16=False, fp16=False, learning_rate=1e-4, lr_scheduler_type="constant",
                gradient_checkpointing=False, disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True},
                dataloader_num_workers=0, remove_unused_columns=False, shuffle_dataset=False,
            )  # fmt: skip
            timer = Timer()
            tokenizer = state.setdefault("tokenizer", transformers.AutoTokenizer.from_pretrained(folder))
            data_set = Dataset.from_list(examples)
            SFTTrainer(state["model"], args=config, train_dataset=data_set, callbacks=[timer], processing_class=tokenizer).train()
        seconds, cpu = ((end - begin) / STEPS for begin, end in zip(timer.began, timer.ended, strict=True))
        return {"seconds": seconds, "cpu": cpu, "loss": float("nan")}

    return one_round


def write_base(what: str, folder: str) -> None:
    model = TransformerModel(MODELS[what])
    tokenizer = TextTokenizer.train(["a small text\n"], 300, sentinels=0)
    save_pretrained(model, folder, token_ids={"eos_token_id": tokenizer.end_id})
    tokenizer.save_pretrained(Path(folder), SEQ)


def run(what: str, pairs: int, console: Console) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_base(what, folder)
        ours = Contender(prepare_ours, folder=folder, adapted=what == "lora")
        theirs = Contender(prepare_peft if what == "lora" else prepare_trl, folder=folder)
        found = compare(ours, theirs, pairs, warmup=2)
        ours.close(), theirs.close()
    tokens = BATCH * SEQ
    table = Table("", "tokens/s", "CPU seconds a step")
    for who, name in (("ours", "ours"), ("theirs", "peft" if what == "lora" else "TRL")):
        table.add_row(name, f"{tokens / found.median(who):,.0f}", f"{found.median(who, 'cpu'):.3f}")
    console.print(table)
    ratios = sorted(their["cpu"] / our["cpu"] for our, their in zip(found.ours, found.theirs, strict=True))
    low, high = found.interval
    by_cpu = ratios[len(ratios) // 2]
    console.print(f"theirs / ours: {found.ratio:.2f} ({low:.2f} to {high:.2f}) by the clock, {by_cpu:.2f} by CPU time, {pairs} pairs")
    if what == "lora":
        console.print(f"loss of a first step: {found.ours[0]['loss']:.4f}, theirs {found.theirs[0]['loss']:.4f}")


KINDS = {  # of operators, by what their names hold; the rest is the rest
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention kernel": ("scaled_dot_product", "flash_attention"),
    "optimizer": ("_fused_adamw", "_foreach"),
    "loss": ("log_softmax", "nll_loss", "logsumexp"),
}


def profile(what: str, console: Console) -> None:
    """The shares of a step that kinds of operators take by the profiler's clock, ours and theirs."""
    table = Table("", *KINDS, "everything else")
    with tempfile.TemporaryDirectory() as folder:
        write_base(what, folder)
        rounds = {"ours": prepare_ours(folder, what == "lora"), "theirs": (prepare_peft if what == "lora" else prepare_trl)(folder)}
        for name, one_round in rounds.items():
            one_round()
            with torch.profiler.profile() as seen:
                one_round()
            times = {event.key: event.self_cpu_time_total / 1000 for event in seen.key_averages()}
            whole = sum(times.values())
            kinds = [sum(ms for key, ms in times.items() if any(part in key for part in parts)) / whole for parts in KINDS.values()]
            table.add_row(name, *(f"{share:.0%}" for share in [*kinds, 1 - sum(kinds)]))
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("sft", "lora"), default="sft")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    screen = Console(markup=False, emoji=False, highlight=False)
    profile(arguments.what, screen) if arguments.profile else run(arguments.what, arguments.pairs, screen)
