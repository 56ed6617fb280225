"""A step of DPO beside TRL's DPOTrainer, both with a reference model beside, on the same weights and the same pairs.

    OMP_NUM_THREADS=1 python tests/benchmarks/preference_speed.py               8 pairs of 32 to 128 tokens, prompts included
    OMP_NUM_THREADS=1 python tests/benchmarks/preference_speed.py --even        8 pairs of 2 x 128 tokens: nothing to gain by packing
    OMP_NUM_THREADS=1 python tests/benchmarks/preference_speed.py --profile     where the time of our step goes

The LLaMA of FACTS: 5.07 million weights, hidden size 256, 5 layers, 4 heads, 4,101 tokens. Ours is chapter 01's `train_step` with the
preference objective on packed rows of 320 positions, the reference by `ReferencedLoader`, clipping at 1 and fused AdamW; its time is that
of 8 pairs. TRL's step, which pads 8 pairs to the longest answer, is timed by its own callbacks, from the beginning of a step to its end,
without evaluation, logging or saving.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from side_by_side import Contender, Round, compare

from shared.data.packing import pack_documents, plan_rows
from shared.data.rows import stack_rows
from shared.data.tokenizer import TextTokenizer
from shared.devices import keep_freed_memory
from shared.loop import accumulate_gradients, keep_totals, train_step
from shared.loss import IGNORED
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.optim.updater import Update
from shared.preference.objective import DPOConfig, PreferenceObjective
from shared.preference.reference import ReferencedLoader, scorer
from shared.totals import Batch

LONGEST, PAIRS, STEPS, POOL = 128, 8, 3, 400
SHAPES = {False: (320, 4), True: (256, 8)}  # positions and rows of our step: 8.1 uneven pairs on the average, or 8 even ones
MODEL = ModelConfig(vocab_size=4101, hidden_size=256, num_hidden_layers=5, num_attention_heads=4, intermediate_size=688,
                    max_position_embeddings=LONGEST, tie_word_embeddings=True)  # fmt: skip


def pairs(even: bool) -> Iterator[dict[str, list[int]]]:
    """The same random pairs for everyone."""
    generator = np.random.default_rng(0)
    while True:
        sizes = [32, 96, 96] if even else [generator.integers(16, 48), *generator.integers(16, 80, 2)]
        prompt, chosen, rejected = (generator.integers(MODEL.vocab_size, size=size).tolist() for size in sizes)
        yield {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def steps(even: bool) -> Iterator[tuple[Batch, int]]:
    """Packed rows for a step, as `shared.preference.rows` packs a data set: a pair stays in one row; and how many pairs these are."""
    source, (seq, count) = pairs(even), SHAPES[even]
    while True:
        pool = [next(source) for _ in range(POOL)]
        lengths = [2 * len(pair["prompt_ids"]) + len(pair["chosen_ids"]) + len(pair["rejected_ids"]) - 1 for pair in pool]
        plan = plan_rows(np.array(lengths), seq)
        order = np.random.default_rng(1).permutation(plan.rows)
        for numbers in (order[first : first + count] for first in range(0, plan.rows - count + 1, count)):
            chosen = [[pool[segment.document] for segment in plan.segments(number)] for number in numbers]
            yield stack_rows([packed(row, seq) for row in chosen]), sum(map(len, chosen))


def packed(row: list[dict[str, list[int]]], seq: int) -> Batch:
    """A row of these pairs: [seq] each."""
    ids = [torch.tensor(pair["prompt_ids"] + pair[which]) for pair in row for which in ("chosen_ids", "rejected_ids")]
    found, place = pack_documents(ids, seq), 0
    for number, document in enumerate(ids):
        found["targets"][place : place + len(row[number // 2]["prompt_ids"]) - 1] = IGNORED
        place += len(document) - 1
    return found


def prepare_ours(folder: str, even: bool) -> Round:
    keep_freed_memory()
    torch.set_num_threads(1)
    policy, reference = load_pretrained(folder), load_pretrained(folder).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    parts = PreferenceObjective(DPOConfig()), accumulate_gradients, keep_totals, Update(1.0)
    source = steps(even)

    def one_round() -> dict[str, float]:
        began, computed = time.perf_counter(), time.process_time()
        drawn = [next(source) for _ in range(STEPS)]
        loader = ReferencedLoader(([batch] for batch, _ in drawn), scorer(reference))
        losses = [train_step(policy, optimizer, step, *parts).mean_loss for step in loader]
        eights = sum(count for _, count in drawn) / PAIRS
        seconds, cpu = time.perf_counter() - began, time.process_time() - computed
        return {"seconds": seconds / eights, "cpu": cpu / eights, "loss": losses[0]}

    return one_round


def prepare_trl(folder: str, even: bool) -> Round:
    """Rounds of STEPS steps of TRL's trainer, after one that is not counted."""
    import transformers
    from datasets import Dataset
    from trl import DPOConfig as Config
    from trl import DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *arguments: Any, **options: Any) -> Any:
            return dataset  # token ids already

    class Timer(transformers.TrainerCallback):
        began = None

        def on_step_begin(self, arguments, progress, control, **more):
            self.began = self.began if progress.global_step > 1 else (time.perf_counter(), time.process_time())

        def on_step_end(self, arguments, progress, control, **more):
            self.ended = time.perf_counter(), time.process_time()

    torch.set_num_threads(1)
    keep_freed_memory()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")  # noqa: E731
    policy, reference, tokenizer, source = load(), load(), transformers.AutoTokenizer.from_pretrained(folder), pairs(even)

    def one_round() -> dict[str, float]:
        data_set = Dataset.from_list([next(source) for _ in range(PAIRS * (STEPS + 1))])
        with tempfile.TemporaryDirectory() as output:
            config = Config(
                output, per_device_train_batch_size=PAIRS, max_length=LONGEST, max_steps=STEPS + 1, logging_steps=10**6, save_strategy="no",
                report_to=[], use_cpu=True, bf16=False, fp16=False, learning_rate=1e-5, lr_scheduler_type="constant",
                gradient_checkpointing=False, disable_tqdm=True, dataloader_num_workers=0, beta=0.1,
            )  # fmt: skip
            timer = Timer()
            Trainer(policy, reference, args=config, train_dataset=data_set, callbacks=[timer], processing_class=tokenizer).train()
        seconds, cpu = ((end - begin) / STEPS for begin, end in zip(timer.began, timer.ended, strict=True))
        return {"seconds": seconds, "cpu": cpu}

    return one_round


def write_base(folder: str) -> None:
    model, tokenizer = TransformerModel(MODEL), TextTokenizer.train(["a small text\n"], 300, sentinels=0)
    save_pretrained(model, folder, token_ids={"eos_token_id": tokenizer.end_id})
    tokenizer.save_pretrained(Path(folder), LONGEST)


def run(even: bool, count: int, console: Console) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_base(folder)
        ours, theirs = Contender(prepare_ours, folder=folder, even=even), Contender(prepare_trl, folder=folder, even=even)
        found = compare(ours, theirs, count, warmup=2)
        ours.close(), theirs.close()
    table = Table("", "seconds for 8 pairs", "CPU seconds")
    for who, name in (("ours", "ours"), ("theirs", "TRL")):
        table.add_row(name, f"{found.median(who):.3f}", f"{found.median(who, 'cpu'):.3f}")
    console.print(table)
    ratios = sorted(their["cpu"] / our["cpu"] for our, their in zip(found.ours, found.theirs, strict=True))
    low, high = found.interval
    console.print(f"theirs / ours: {found.ratio:.2f} ({low:.2f} to {high:.2f}) by the clock, {count} pairs of rounds")
    console.print(f"by CPU time {ratios[len(ratios) // 2]:.2f} ({ratios[1]:.2f} to {ratios[-2]:.2f} without the extremes)")
    console.print(f"loss of a first step: {found.ours[0]['loss']:.4f}")


def profile(even: bool, console: Console) -> None:
    """The operators that take most of one of our steps."""
    with tempfile.TemporaryDirectory() as folder:
        write_base(folder)
        one_round = prepare_ours(folder, even)
        one_round()
        with torch.profiler.profile() as seen:
            one_round()
        console.print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=50), soft_wrap=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--pairs", type=int, default=11)
    asked = parser.parse_args()
    screen = Console(markup=False, emoji=False, highlight=False)
    profile(asked.even, screen) if asked.profile else run(asked.even, asked.pairs, screen)
