"""A step of GRPO, rollout included, beside TRL's GRPOTrainer, on the same weights and prompts.

    OMP_NUM_THREADS=1 python tests/benchmarks/grpo_speed.py                 1 prompt, 8 answers of 64 tokens, no reference
    OMP_NUM_THREADS=1 python tests/benchmarks/grpo_speed.py --beta 0.04     with a reference model beside
    OMP_NUM_THREADS=1 python tests/benchmarks/grpo_speed.py --profile       where the time of our step goes

The LLaMA of FACTS: 5.07 million weights, hidden size 256, 5 layers, 4 heads, 4,101 tokens. Ours is chapter 12's `GroupLoader` with the
`CachedSampler`, and chapter 01's `train_step` with GRPO's objective, clipping at 1 and fused AdamW. TRL's step is timed by its own
callbacks, from the beginning of a step to its end, without evaluation, logging or saving. The reward, of both, is the share of even
tokens; no answer ends before its 64th token.
"""

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import torch
from preference_speed import MODEL, write_base
from rich.console import Console
from rich.table import Table
from side_by_side import Contender, Round, compare

from shared.devices import keep_freed_memory
from shared.loop import accumulate_gradients, keep_totals, train_step
from shared.model.hf.pretrained import load_pretrained
from shared.optim.updater import Update
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.preference.reference import scorer
from shared.preference.value_head import token_scores
from shared.rl.generation import CachedSampler
from shared.rl.grpo import GRPOAdvantages, GRPOConfig, GRPOObjective, GroupLoader

PROMPT, ANSWERS, TOKENS, STEPS, LIMIT = 16, 8, 64, 4, 300


def prompts(count: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return generator.integers(LIMIT, MODEL.vocab_size, size=(count, PROMPT)).tolist()


def even(ids: list[int]) -> float:
    return sum(token % 2 == 0 for token in ids) / len(ids)


def prepare_ours(folder: str, beta: float) -> Round:
    keep_freed_memory()
    torch.set_num_threads(1)
    policy = load_pretrained(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    config = GRPOConfig(prompts=1, answers=ANSWERS, new_tokens=TOKENS, minibatches=1, kl_coefficient=beta)
    reference = scorer(load_pretrained(folder).requires_grad_(False), lambda model, batch: token_scores(model, batch)[0])
    loader = GroupLoader(
        apply_parallel(policy, Mesh(ParallelConfig(), SingleRankCommunicator())), prompts(400), sampler=CachedSampler(TOKENS, ()),
        reward=lambda samples: [even(each.completion.ids) for each in samples], config=config, advantages=GRPOAdvantages(config),
        seq=ANSWERS * (PROMPT + TOKENS - 1) // 4, micro_batch_size=4, reference=reference if beta else None,
    )  # fmt: skip
    source, parts = iter(loader), (GRPOObjective(config), accumulate_gradients, keep_totals, Update(1.0))

    def one_round() -> dict[str, float]:
        began, computed = time.perf_counter(), time.process_time()
        drawing = 0.0
        for _ in range(STEPS):
            start = time.perf_counter()
            batches = next(source)
            drawing += time.perf_counter() - start
            train_step(policy, optimizer, batches, *parts)
        seconds, cpu = time.perf_counter() - began, time.process_time() - computed
        return {"seconds": seconds / STEPS, "cpu": cpu / STEPS, "rollout": drawing / STEPS}

    return one_round


def prepare_trl(folder: str, beta: float) -> Round:
    """Rounds of STEPS steps of TRL's trainer, after one that is not counted."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig as Config
    from trl import GRPOTrainer

    class Timer(transformers.TrainerCallback):
        began = None

        def on_step_begin(self, arguments: Any, progress: Any, control: Any, **more: Any) -> None:
            self.began = self.began if progress.global_step > 1 else (time.perf_counter(), time.process_time())

        def on_step_end(self, arguments: Any, progress: Any, control: Any, **more: Any) -> None:
            self.ended = time.perf_counter(), time.process_time()

    torch.set_num_threads(1)
    keep_freed_memory()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    texts = [tokenizer.decode(np.random.default_rng(number).integers(5, 250, PROMPT)) for number in range(400)]
    reward = lambda prompts, completions, completion_ids, **more: [even(ids) for ids in completion_ids]  # noqa: E731

    def one_round() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as output:
            config = Config(
                output, per_device_train_batch_size=ANSWERS, num_generations=ANSWERS, max_completion_length=TOKENS, max_steps=STEPS + 1,
                logging_steps=10**6, save_strategy="no", report_to=[], use_cpu=True, bf16=False, fp16=False, learning_rate=1e-5,
                lr_scheduler_type="constant", gradient_checkpointing=False, disable_tqdm=True, dataloader_num_workers=0, beta=beta,
                generation_kwargs={"min_new_tokens": TOKENS},
            )  # fmt: skip
            timer = Timer()
            policy = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
            GRPOTrainer(
                policy, reward, args=config, train_dataset=Dataset.from_list([{"prompt": text} for text in texts]), callbacks=[timer],
                processing_class=tokenizer,
            ).train()  # fmt: skip
        seconds, cpu = ((end - begin) / STEPS for begin, end in zip(timer.began, timer.ended, strict=True))
        return {"seconds": seconds, "cpu": cpu}

    return one_round


def run(beta: float, count: int, console: Console) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_base(folder)
        ours, theirs = Contender(prepare_ours, folder=folder, beta=beta), Contender(prepare_trl, folder=folder, beta=beta)
        found = compare(ours, theirs, count, warmup=2)
        ours.close(), theirs.close()
    table = Table("", "seconds a step", "CPU seconds", "of which the rollout")
    table.add_row("ours", f"{found.median('ours'):.3f}", f"{found.median('ours', 'cpu'):.3f}", f"{found.median('ours', 'rollout'):.3f}")
    table.add_row("TRL", f"{found.median('theirs'):.3f}", f"{found.median('theirs', 'cpu'):.3f}", "")
    console.print(table)
    ratios = sorted(their["cpu"] / our["cpu"] for our, their in zip(found.ours, found.theirs, strict=True))
    low, high = found.interval
    console.print(f"theirs / ours: {found.ratio:.2f} ({low:.2f} to {high:.2f}) by the clock, {count} pairs of rounds")
    console.print(f"by CPU time {ratios[len(ratios) // 2]:.2f} ({ratios[1]:.2f} to {ratios[-2]:.2f} without the extremes)")


def profile(beta: float, console: Console) -> None:
    """The operators that take most of one of our steps."""
    with tempfile.TemporaryDirectory() as folder:
        write_base(folder)
        one_round = prepare_ours(folder, beta)
        one_round()
        with torch.profiler.profile() as seen:
            found = one_round()
        console.print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=50), soft_wrap=True)
        console.print(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--pairs", type=int, default=11)
    asked = parser.parse_args()
    screen = Console(markup=False, emoji=False, highlight=False)
    profile(asked.beta, screen) if asked.profile else run(asked.beta, asked.pairs, screen)
