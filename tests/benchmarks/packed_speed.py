"""Packed rows of 2,048 positions on the CPU: attention document by document, beside an older checkout and transformers.

    git worktree add ../before bbed0532
    python tests/benchmarks/packed_speed.py ../before           attention and a whole step of both; a step of transformers
    python tests/benchmarks/packed_speed.py .                   the control: 1.00 in the first two rows

The model is the LLaMA of step_speed.py, 12 million weights, float32, one thread; processes keep freed memory. Documents have 100 to 300
positions, 200 on average. Attention is forward and backward of one layer's, from queries, keys and values, with the mask that the model's
own stack makes. A step is forward, loss, backward, fused AdamW. transformers gets position ids, from which it makes its mask. Time is the
process's own, so that other work does not count.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import Comparison, Contender, Round, compare

SEQ = 2048
SIZES = {
    "vocab_size": 4096, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024,
    "max_position_embeddings": SEQ, "tie_word_embeddings": True,
}  # fmt: skip
ROWS = {
    "attention": "attention, beside the older checkout",
    "step": "a step, beside the older checkout",
    "transformers": "a step, beside transformers",
}


def batches():
    """Endless rows, the same ones in each process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    while True:
        lengths = torch.randint(100, 301, (SEQ // 100,), generator=generator)
        documents = torch.arange(len(lengths)).repeat_interleave(lengths)[:SEQ]
        first = torch.ones(SEQ, dtype=torch.bool)
        first[1:] = documents[1:] != documents[:-1]
        places = torch.arange(SEQ)
        ids = torch.randint(SIZES["vocab_size"], (1, SEQ + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0, :-1][first[1:]] = -100
        positions = places - torch.where(first, places, 0).cummax(dim=0).values
        yield {"input_ids": ids[:, :-1], "targets": targets, "documents": documents[None], "positions": positions[None]}


def timed(step) -> Round:
    data = batches()

    def one_round() -> dict[str, float]:
        batch = next(data)
        began = time.process_time()
        found = step(batch)
        return {"seconds": time.process_time() - began, "found": float(found)}

    return one_round


def prepared(checkout: str) -> None:
    """Import the course from a checkout, with the settings of its runs."""
    sys.path.insert(0, checkout)
    import torch

    from shared import devices

    if not Path(devices.__file__).is_relative_to(checkout):
        raise RuntimeError(f"The course is imported from {devices.__file__}, not from {checkout}.")
    torch.set_num_threads(1)
    devices.keep_freed_memory()


def prepare_attention(checkout: str) -> Round:
    prepared(checkout)
    import torch

    from shared.model.config import ModelConfig
    from shared.model.masks import Documents
    from shared.model.transformer import TransformerModel

    stack, places = TransformerModel(ModelConfig(**SIZES)).stack, torch.arange(SEQ)
    attention = stack.blocks["0"].attention
    shape, generator = (1, SEQ, SIZES["num_attention_heads"], attention.head_dim), torch.Generator().manual_seed(1)
    *tensors, upstream = (torch.randn(*shape, generator=generator).transpose(1, 2) for _ in range(4))

    def step(batch):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        mask = stack.context(places, batch["positions"], SEQ, Documents(batch["documents"])).masks["full_attention"]
        mixed = attention.attend(*leaves, mask, attention.scale, 0.0)
        return sum(gradient.norm() for gradient in torch.autograd.grad(mixed, leaves, upstream))

    return timed(step)


def prepare_step(checkout: str, folder: str) -> Round:
    prepared(checkout)
    import torch

    from shared.loop import accumulate_gradients, apply_update, keep_totals, train_step
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.model.hf.pretrained import load_pretrained

    model = load_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parts = packed_next_token_objective, accumulate_gradients, keep_totals, apply_update
    return timed(lambda batch: train_step(model, optimizer, [batch], *parts).mean_loss)


def prepare_transformers(folder: str) -> Round:
    prepared(str(Path(__file__).parents[2]))
    import torch
    import torch.nn.functional as F
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch):
        logits = model(input_ids=batch["input_ids"], position_ids=batch["positions"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return timed(step)


def row(name: str, pairs: Comparison) -> str:
    worst = max(abs(a["found"] - b["found"]) / abs(b["found"]) for a, b in zip(pairs.ours, pairs.theirs, strict=True))
    if worst > 1e-4:
        raise RuntimeError(f"{name}: results differ by {worst:.1e}: the two do not compute the same thing.")
    low, high = pairs.interval
    times = " | ".join(f"{pairs.median(who) * 1e3:,.0f}" for who in ("ours", "theirs"))
    return f"| {name} | {times} | {1 / pairs.ratio:.2f} | {pairs.ratio:.2f} ({low:.2f} to {high:.2f}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    here, before = str(Path(__file__).resolve().parents[2]), str(arguments.before.resolve())
    sys.path.insert(0, here)
    from shared.model.config import ModelConfig
    from shared.model.hf.pretrained import save_pretrained
    from shared.model.transformer import TransformerModel

    print("| one thread | ours, ms | theirs, ms | ours of theirs | times faster (95 %) |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(TransformerModel(ModelConfig(**SIZES)), folder)
        for name in arguments.rows:
            if name == "attention":
                contenders = [Contender(prepare_attention, checkout=checkout) for checkout in (here, before)]
            else:
                theirs = Contender(prepare_transformers, folder=folder) if name == "transformers" else None
                contenders = [Contender(prepare_step, checkout=here, folder=folder)]
                contenders.append(theirs or Contender(prepare_step, checkout=before, folder=folder))
            print(row(ROWS[name], compare(*contenders, arguments.pairs, warmup=2)), flush=True)
            for contender in contenders:
                contender.close()


if __name__ == "__main__":
    main()
