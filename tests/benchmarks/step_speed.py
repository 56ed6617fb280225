"""A training step of our model beside transformers', at one shape: forward, backward, fused AdamW.

    python tests/benchmarks/step_speed.py                     LLaMA and GPT-2, float32 and bfloat16
    python tests/benchmarks/step_speed.py --peers llama --dtypes bfloat16 --pairs 31
    python tests/benchmarks/step_speed.py --device cuda

Both start from the same weights (ours are saved and loaded by transformers), see the same tokens, compute the same mean loss, keep
float32 master weights, and cast by the same autocast. Ours is chapter 01's `train_step` with the sliced loss, in a process that keeps
freed memory, as our runs do; theirs is a plain loop in a plain process, and in a second comparison in one that keeps memory too.
"""

import argparse
import contextlib
import tempfile
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from side_by_side import Comparison, Contender, Round, compare

from shared.devices import keep_freed_memory
from shared.model.chunked_loss import packed_next_token_objective
from shared.loop import accumulate_gradients, apply_update, keep_totals, train_step
from shared.model.config import ModelConfig
from shared.model.counting import parameter_counts
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel

LAYERS, HEADS, HIDDEN, SEQ, BATCH, VOCAB = 6, 6, 384, 256, 8, 4096
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "max_position_embeddings": SEQ, "tie_word_embeddings": True,
}  # fmt: skip
PEERS = {
    "llama": ModelConfig(**SIZES, intermediate_size=1024),
    "gpt2": ModelConfig(
        **SIZES, position="learned", norm="layer_norm", hidden_act="gelu_tanh", gated=False,
        attention_bias=True, attention_output_bias=True, mlp_bias=True,
    ),
}  # fmt: skip
STEPS = 2  # in a round
TOKENS = BATCH * SEQ


def batches(device: str):
    """The same random tokens for everyone."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator).to(device)
        yield {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def casting(device: str, dtype: str):
    return contextlib.nullcontext() if dtype == "float32" else torch.autocast(device, torch.bfloat16)


def timed(step, device: str) -> Round:
    """Rounds of STEPS steps: step(batch) -> loss."""
    data = batches(device)

    def one_round() -> dict[str, float]:
        chosen = [next(data) for _ in range(STEPS)]
        began = time.perf_counter()
        losses = [step(batch) for batch in chosen]
        if device == "cuda":
            torch.cuda.synchronize()
        return {"seconds": (time.perf_counter() - began) / STEPS, "loss": float(losses[0])}

    return one_round


def prepare_ours(folder: str, device: str, dtype: str) -> Round:
    keep_freed_memory()
    model = load_pretrained(folder, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch):
        def objective(model, microbatch):
            with casting(device, dtype):
                return packed_next_token_objective(model, microbatch)

        return train_step(model, optimizer, [batch], objective, accumulate_gradients, keep_totals, apply_update).mean_loss

    return timed(step, device)


def prepare_theirs(folder: str, device: str, dtype: str, keep: bool) -> Round:
    import transformers

    if keep:
        keep_freed_memory()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").to(device).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch):
        with casting(device, dtype):
            logits = model(input_ids=batch["input_ids"]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return timed(step, device)


def prepare_products(peer: str, device: str, dtype: str) -> Round:
    """A step's matrix products alone, at the model's own shapes, into memory that is there: what no step can be faster than."""
    keep_freed_memory()
    config, kind = PEERS[peer].resolved(), getattr(torch, dtype)
    inner, gates = config.intermediate_size, 2 if config.gated else 1
    shapes = [(HIDDEN, HIDDEN)] * 4 * LAYERS + [(HIDDEN, inner)] * gates * LAYERS + [(inner, HIDDEN)] * LAYERS + [(HIDDEN, VOCAB)]
    made = {
        (rows, columns): [torch.randn(*shape, device=device).to(kind) for shape in ((TOKENS, rows), (columns, rows), (TOKENS, columns))]
        for rows, columns in set(shapes)
    }
    outs = {shape: [torch.empty_like(tensor) for tensor in tensors] for shape, tensors in made.items()}

    def step(_):
        for shape in shapes:
            (x, weight, gradient), (of_x, of_weight, out) = made[shape], outs[shape]
            torch.mm(x, weight.T, out=out)
            torch.mm(gradient, weight, out=of_x)
            torch.mm(gradient.T, x, out=of_weight)
        return 0.0

    return timed(step, device)


def flops_per_token(peer: str) -> float:
    """6 for each weight in a matrix product (forward, and backward twice), and 12 L d T for attention."""
    counts = parameter_counts(PEERS[peer])
    return 6 * (counts["matrix"] + VOCAB * HIDDEN) + 12 * LAYERS * HIDDEN * SEQ


def run(peer: str, dtype: str, device: str, pairs: int) -> tuple[dict[bool, Comparison], float]:
    """Ours against theirs, in a plain process and in one that keeps memory; and the products' seconds."""
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(TransformerModel(PEERS[peer]), folder)
        common = {"device": device, "dtype": dtype}
        found = {}
        for keep in (False, True):
            ours, theirs = Contender(prepare_ours, folder=folder, **common), Contender(prepare_theirs, folder=folder, keep=keep, **common)
            found[keep] = compare(ours, theirs, pairs, warmup=4)
            ours.close(), theirs.close()
        products = Contender(prepare_products, peer=peer, **common)
        seconds = sorted(products.round()["seconds"] for _ in range(9))[4]
        products.close()
    allowed = 2e-3 if dtype == "bfloat16" else 2e-5
    worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for c in found.values() for a, b in zip(c.ours, c.theirs, strict=True))
    if worst > allowed:
        raise RuntimeError(f"Losses differ by {worst:.1e}: the two do not compute the same thing.")
    return found, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    console = Console(width=150)
    table = Table(
        title=f"A training step, {arguments.pairs} pairs of {STEPS} steps, {arguments.device}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for column in (
        "peer",
        "dtype",
        "their process",
        "ours, tokens/s",
        "theirs, tokens/s",
        "ratio (95 %)",
        "ours, of products",
        "theirs, of products",
    ):
        table.add_column(column, justify="left" if column in ("peer", "dtype", "their process") else "right")
    for peer in arguments.peers:
        for dtype in arguments.dtypes:
            found, products = run(peer, dtype, arguments.device, arguments.pairs)
            rate = matrix_flops(peer) / products
            for keep, comparison in found.items():
                low, high = comparison.interval
                ours, theirs = (TOKENS / comparison.median(who) for who in ("ours", "theirs"))
                shares = (f"{flops_per_token(peer) * speed / rate:.0%}" for speed in (ours, theirs))
                ratio = f"{comparison.ratio:.2f} ({low:.2f} to {high:.2f})"
                table.add_row(peer, dtype, "keeps memory" if keep else "plain", f"{ours:,.0f}", f"{theirs:,.0f}", ratio, *shares)
            console.print(f"{peer}, {dtype}: products alone {products * 1e3:.0f} ms a step, {rate / 1e9:,.0f} GFLOP/s")
    console.print(table)


def matrix_flops(peer: str) -> float:
    """Of a step's products with weights, as `prepare_products` does them."""
    return TOKENS * 6 * (parameter_counts(PEERS[peer])["matrix"] + VOCAB * HIDDEN)


if __name__ == "__main__":
    main()
