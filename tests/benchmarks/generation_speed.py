"""Generation with a KV cache beside transformers' `generate`, at one shape: greedy, 64 tokens of prompt, 128 new ones, float32.

    python tests/benchmarks/generation_speed.py                     1 and 16 rows, alternating pairs in processes of their own
    OMP_NUM_THREADS=1 python tests/benchmarks/generation_speed.py --clock process_time         on a busy machine: processor time
    python tests/benchmarks/generation_speed.py --profile           what a step of ours spends its time on
    OMP_NUM_THREADS=1 python tests/benchmarks/generation_speed.py --fused --clock process_time      the fused step beside our own passes

Both have the same weights (ours are saved and loaded by transformers) and write the same number of tokens. "Products" are the step's matrix
products alone, at their own shapes and over all layers' weights: what no step in float32 can be faster than.
"""

import argparse
import tempfile
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from side_by_side import Contender, Round, compare

from shared.devices import keep_freed_memory
from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.rl.generation import Drawing, generate_tokens

CONFIG = ModelConfig(
    vocab_size=4096, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1024, max_position_embeddings=256,
    tie_word_embeddings=True,
)  # fmt: skip
PROMPT, NEW = 64, 128


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(1, CONFIG.vocab_size, (rows, PROMPT), generator=torch.Generator().manual_seed(0))


def timed(write, clock: str) -> Round:
    """Rounds of one call. seconds: of a token of each row."""
    now = getattr(time, clock)

    def one_round() -> dict[str, float]:
        began = now()
        write()
        return {"seconds": (now() - began) / NEW}

    return one_round


def write_all(model: TransformerModel, rows: int) -> int:
    return sum(1 for _ in generate_tokens(model, prompts(rows).tolist(), NEW, drawing=Drawing(temperature=0.0)))


def prepare_ours(folder: str, rows: int, clock: str) -> Round:
    keep_freed_memory()
    model = load_pretrained(folder).eval()
    return timed(lambda: write_all(model, rows), clock)


def prepare_kind(kind: str, rows: int, clock: str, fused: bool) -> Round:
    """Ours, of a kind of model that the fused step knows, by it or by the model's own passes."""
    keep_freed_memory()
    model = TransformerModel(replace(CONFIG, qk_norm=kind == "norms of heads"))
    if kind == "LoRA":
        attach_adapter(model, AdapterConfig(rank=8))
    model.eval()

    def write() -> int:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bfloat16"):
            found = generate_tokens(model, prompts(rows).tolist(), NEW, drawing=Drawing(temperature=0.0), fused=fused)
            return sum(1 for _ in found)

    return timed(write, clock)


def prepare_theirs(folder: str, rows: int, clock: str) -> Round:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    ids = prompts(rows)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options), clock)


def prepare_products(rows: int, clock: str) -> Round:
    keep_freed_memory()
    config = CONFIG.resolved()
    wide, inner = config.hidden_size, config.intermediate_size
    shapes = [(wide, 3 * wide), (wide, wide), (wide, 2 * inner), (inner, wide)] * config.num_hidden_layers + [(wide, config.vocab_size)]
    pairs = [(torch.randn(rows, into), torch.randn(out, into)) for into, out in shapes]

    @torch.inference_mode()
    def write() -> None:
        for _ in range(NEW):
            for x, weight in pairs:
                F.linear(x, weight)

    return timed(write, clock)


def profile(rows: int) -> None:
    model = TransformerModel(CONFIG).eval()
    write_all(model, rows)
    with torch.profiler.profile() as profiled:
        write_all(model, rows)
    print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=40))


def compare_fused(row_counts: list[int], pairs: int, clock: str) -> None:
    table = Table("model", "rows", "fused, ms a step", "own passes", "ratio (95 %)")
    for kind in ("float32", "bfloat16", "LoRA", "norms of heads"):
        for rows in row_counts:
            settings = {"kind": kind, "rows": rows, "clock": clock}
            fused, own = (Contender(prepare_kind, fused=each, **settings) for each in (True, False))
            found = compare(fused, own, pairs, warmup=1)
            low, high = found.interval
            ours, other = (1000 * found.median(who) for who in ("ours", "theirs"))
            table.add_row(kind, str(rows), f"{ours:.1f}", f"{other:.1f}", f"{found.ratio:.2f} ({low:.2f} to {high:.2f})")
            fused.close(), own.close()
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--clock", choices=["perf_counter", "process_time"], default="perf_counter")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--fused", action="store_true")
    chosen = parser.parse_args()
    if chosen.fused:
        compare_fused(chosen.rows, chosen.pairs, chosen.clock)
        return
    if chosen.profile:
        for rows in chosen.rows:
            profile(rows)
        return
    table = Table("rows", "ours, ms a step", "transformers", "products alone", "ratio (95 %)")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(TransformerModel(CONFIG), folder)
        for rows in chosen.rows:
            ours, theirs = (Contender(prepare, folder=folder, rows=rows, clock=chosen.clock) for prepare in (prepare_ours, prepare_theirs))
            products = Contender(prepare_products, rows=rows, clock=chosen.clock)
            found = compare(ours, theirs, chosen.pairs, warmup=1)
            least = 1000 * min(products.round()["seconds"] for _ in range(5))
            low, high = found.interval
            mine, other = (1000 * found.median(who) for who in ("ours", "theirs"))
            table.add_row(str(rows), f"{mine:.1f}", f"{other:.1f}", f"{least:.1f}", f"{found.ratio:.2f} ({low:.2f} to {high:.2f})")
            for contender in (ours, theirs, products):
                contender.close()
    Console().print(table)


if __name__ == "__main__":
    main()
