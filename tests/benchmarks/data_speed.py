"""What data costs: preparing text beside other tools, a loader's share of a training step, and memory beside the size of the text.

    python tests/benchmarks/data_speed.py                     all tables
    python tests/benchmarks/data_speed.py --what memory --megabytes 300

Tokenizing is compared on the embedded corpus with one tokenizer, which everyone gets ready-made: ours writes shards from cleaned parts,
`datasets` maps the same texts with the same `encode_batch_fast` into its own files, and `tokenizers` alone keeps the ids in memory. Each
contender is a process of its own; `datasets` with two processes leaves a process in which tokenizers uses one core, so nobody shares.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from side_by_side import Contender, Round, compare

SAMPLE = slice(0, None, 4)  # of the embedded corpus: every fourth file


def corpus() -> list[str]:
    from shared.data.source import Source
    from shared.data.sources import open_source

    return [document.content.decode() for document in open_source(Source(), lambda *_: None)]


def prepare_ours(folder: str) -> Round:
    from rich.progress import Progress

    from shared.corpus import Document
    from shared.data.cleaning.cleaner import Cleaner, CleaningConfig
    from shared.data.clean_shards import CleanShards
    from shared.data.prepare import write_shards
    from shared.data.source import Source
    from shared.data.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.load(Path(folder))
    parts = CleanShards(Path(folder) / f"parts{os.getpid()}", 0.05)
    documents = [Document(str(number), text.encode()) for number, text in enumerate(corpus()[SAMPLE])]
    cleaner = Cleaner(CleaningConfig(stages=()))
    parts.write(0, list(cleaner.clean(documents)), cleaner)
    parts.finish(1, cleaner.report, [Source()])

    def one_round() -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=folder) as target, Progress(disable=True) as bar:
            began = time.perf_counter()
            write_shards(Path(target), parts, tokenizer, bar)
            return {"seconds": time.perf_counter() - began}

    return one_round


def prepare_datasets(folder: str, processes: int) -> Round:
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = datasets.Dataset.from_dict({"text": corpus()[SAMPLE]})
    source = f"{folder}/texts{os.getpid()}"
    texts.save_to_disk(source)
    texts = datasets.load_from_disk(source)

    def encode(batch):
        return {"ids": [encoding.ids for encoding in tokenizer.encode_batch_fast(batch["text"])]}

    def one_round() -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=folder) as target:
            began = time.perf_counter()
            options = {"num_proc": processes} if processes > 1 else {}
            mapped = texts.map(encode, batched=True, batch_size=64, remove_columns="text", load_from_cache_file=False, **options)
            mapped.save_to_disk(target)
            return {"seconds": time.perf_counter() - began}

    return one_round


def prepare_tokenizers(folder: str) -> Round:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = corpus()[SAMPLE]

    def one_round() -> dict[str, float]:
        began = time.perf_counter()
        for first in range(0, len(texts), 64):
            tokenizer.encode_batch_fast(texts[first : first + 64])
        return {"seconds": time.perf_counter() - began}

    return one_round


def tokenizing(console: Console, pairs: int) -> None:
    from shared.data.tokenizer import TextTokenizer

    with tempfile.TemporaryDirectory() as folder:
        texts = corpus()[SAMPLE]
        tokenizer = TextTokenizer.train(texts, 4096)
        tokenizer.save(Path(folder) / "tokenizer.json")
        tokens = sum(map(len, tokenizer.encode_batch_fast(texts)))
        table = Table(title=f"Tokenizing {sum(map(len, texts)) / 1e6:.1f} MB, {tokens / 1e6:.2f} M tokens")
        for column in ("beside ours", "ours, M tokens/s", "theirs", "ratio (95 %)"):
            table.add_column(column)
        peers = {
            "tokenizers alone, nothing written": (prepare_tokenizers, {}),
            "datasets.map, batched": (prepare_datasets, {"processes": 1}),
            "datasets.map, batched, two processes": (prepare_datasets, {"processes": 2}),
        }
        for name, (prepare_theirs, options) in peers.items():
            ours, theirs = Contender(prepare_ours, folder=folder), Contender(prepare_theirs, folder=folder, **options)
            found = compare(ours, theirs, pairs, warmup=1)
            ours.close(), theirs.close()
            speeds = (f"{tokens / found.median(who) / 1e6:.2f}" for who in ("ours", "theirs"))
            table.add_row(name, *speeds, f"{found.ratio:.2f} ({found.interval[0]:.2f} to {found.interval[1]:.2f})")
        console.print(table)


def sign_ours() -> Round:
    from shared.data.cleaning.duplicates import signature

    contents = [text.encode() for text in corpus()[SAMPLE]]
    return lambda: {"seconds": timed(lambda: [signature(content) for content in contents], 1)}


def sign_datasketch() -> Round:
    """The same runs of five words, the same number of hash functions."""
    import re

    import datasketch

    from shared.data.cleaning.duplicates import BANDS, ROWS, WORDS

    texts = corpus()[SAMPLE]

    def sign(text: str) -> datasketch.MinHash:
        words = re.findall(r"\w+", text.lower())
        made = datasketch.MinHash(num_perm=BANDS * ROWS)
        made.update_batch({" ".join(words[i : i + WORDS]).encode() for i in range(max(1, len(words) - WORDS + 1))})
        return made

    return lambda: {"seconds": timed(lambda: [sign(text) for text in texts], 1)}


def duplicates(console: Console, pairs: int) -> None:
    megabytes = sum(map(len, corpus()[SAMPLE])) / 1e6
    ours, theirs = Contender(sign_ours), Contender(sign_datasketch)
    found = compare(ours, theirs, pairs, warmup=1)
    ours.close(), theirs.close()
    table = Table(title=f"Signatures of {megabytes:.1f} MB, 112 hash functions")
    for column in ("ours, MB/s", "datasketch, MB/s", "ratio (95 %)"):
        table.add_column(column)
    speeds = (f"{megabytes / found.median(who):.1f}" for who in ("ours", "theirs"))
    table.add_row(*speeds, f"{found.ratio:.2f} ({found.interval[0]:.2f} to {found.interval[1]:.2f})")
    console.print(table)


def serving(console: Console) -> None:
    """A loader's time for a step of the benchmark model, in the thread that makes it, beside the step."""
    import torch
    from step_speed import BATCH, PEERS, SEQ

    from shared.devices import keep_freed_memory
    from shared.data.fim import FillInMiddle, FimConfig
    from shared.data.loader import PackedLoader
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.data.prepare import PrepareConfig, prepare
    from shared.loop import accumulate_gradients, apply_update, keep_totals, train_step
    from shared.model.transformer import TransformerModel

    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(PrepareConfig(vocab_size=4096, tokenizer_bytes=4_000_000), Path(folder))
        tokenizer = prepared.tokenizer
        moving = FillInMiddle(FimConfig(), tokenizer.encode, tokenizer.decode, tokenizer.fim_tokens)
        model = TransformerModel(PEERS["llama"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        table = Table(title=f"Serving {BATCH} rows of {SEQ} tokens")
        for column in ("loader", "making a step, ms", "waiting for it, ms", "training step, ms", "share of the step spent waiting"):
            table.add_column(column)
        for name, transform in (("packed", None), ("packed, half of the middles moved", moving)):
            options = {"seq": SEQ, "batch_size": BATCH, "transform": transform, "slack": 8 if transform else 0}
            made = iter(PackedLoader(prepared.training, prefetch=0, **options))
            next(made)
            making = timed(lambda made=made: next(made), 50)
            steps = iter(PackedLoader(prepared.training, prefetch=2, **options))
            waits, trains = [], []
            for _ in range(16):
                began = time.perf_counter()
                microbatches = next(steps)
                got = time.perf_counter()
                parts = (packed_next_token_objective, accumulate_gradients, keep_totals, apply_update)
                train_step(model, optimizer, microbatches, *parts)
                waits.append(got - began)
                trains.append(time.perf_counter() - got)
            wait, step = sorted(waits)[8], sorted(trains)[8]
            table.add_row(name, f"{making * 1e3:.2f}", f"{wait * 1e3:.2f}", f"{step * 1e3:.0f}", f"{wait / (wait + step):.2%}")
        console.print(table)


def timed(function, times: int) -> float:
    """The median of its seconds."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[times // 2]


MEMORY = """
import json, resource, sys
from pathlib import Path
from shared.data.loader import PackedLoader
from shared.data.prepare import PrepareConfig, prepare
from shared.data.source import Source
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
began = peak()
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[3]) * 2**20, resource.RLIM_INFINITY))
config = PrepareConfig(sources=(Source(sys.argv[1]),), tokenizer_bytes=4_000_000, part_bytes=2**23)
done = prepare(config, Path(sys.argv[2]))
prepared = peak()
for number, _ in zip(range(200), PackedLoader(done.training, seq=256, batch_size=8)): pass
texts = int(done.training.byte_counts.sum() + done.held_out.byte_counts.sum())
print(json.dumps({"began": began, "prepared": prepared, "served": peak(), "text": texts / 2**20}))
"""


def memory(console: Console, megabytes: int, limit: int) -> None:
    """Prepare and serve made-up code of `megabytes` in a process whose data may not exceed `limit` MB."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.jsonl"
        write_made_up(path, megabytes)
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", MEMORY, str(path), f"{folder}/out", str(limit)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            console.print(f"{megabytes} MiB did not fit into {limit} MiB: {done.stderr.splitlines()[-1]}")
            return
        found = json.loads(done.stdout)
        table = Table(title=f"Memory, MiB, with data limited to {limit} MiB")
        for column, value in (
            ("text", found["text"]),
            ("peak before", found["began"]),
            ("peak after preparing", found["prepared"]),
            ("after serving", found["served"]),
        ):
            table.add_column(column)
        table.add_row(*(f"{found[name]:.0f}" for name in ("text", "began", "prepared", "served")))
        console.print(table)


def write_made_up(path: Path, megabytes: int) -> None:
    """Lines of the embedded corpus in an order drawn anew for every document, so that none is a duplicate."""
    import random

    draw = random.Random(0)
    lines = [line for text in corpus()[::10] for line in text.splitlines() if line.strip()]
    size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 2**20:
            text = "\n".join(draw.choices(lines, k=200))
            size += len(text)
            file.write(json.dumps({"text": text}) + "\n")


WHAT = ["tokenizing", "duplicates", "serving", "memory"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="*", default=WHAT, choices=WHAT)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--limit", type=int, default=700, help="MB of data that the process may hold")
    options = parser.parse_args()
    out = Console(width=140)
    if "tokenizing" in options.what:
        tokenizing(out, options.pairs)
    if "duplicates" in options.what:
        duplicates(out, options.pairs)
    if "serving" in options.what:
        serving(out)
    if "memory" in options.what:
        memory(out, options.megabytes, options.limit)
