"""What the preparation of conversations costs in two checkouts of this repository, in turn: processor time for some MB of chats.

    git worktree add ../before 9553d248
    python tests/benchmarks/chat_speed.py ../before                   20 MB of plain chats, and 20 MB with tools under a template of tools
    python tests/benchmarks/chat_speed.py . --megabytes 2             the control: 1.00

A contender is `prepare_chats` of its checkout, in a process of one thread that imports from that checkout alone. The conversations are made
of the embedded corpus, one to four turns each, and are the same for both. Processor time is of the whole process and of its child, which
renders the template.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
KINDS = ("plain", "tools")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


class Checkout:
    """A contender for `side_by_side.compare`: one checkout's process, which prepares anew when asked."""

    def __init__(self, checkout: Path, kind: str, folder: Path):
        paths = {"PYTHONPATH": f"{checkout}:{checkout / 'tests' / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
        paths |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(checkout), "--serve", kind, str(folder)],
            cwd=checkout, env=os.environ | paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.answer()

    def round(self) -> dict[str, float]:
        print("round", file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, float]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("A contender failed: see above.")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(kind: str, folder: Path) -> None:
    """A checkout's rounds, asked for on standard input."""
    from shared.finetune.chat.datasets import ChatSource
    from shared.finetune.chat.prepare import ChatConfig, prepare_chats

    answers, sys.stdout = sys.stdout, sys.stderr
    template = "chatml" if kind == "plain" else str(folder / "tools.jinja")
    config = ChatConfig(sources=(ChatSource(str(folder / f"{kind}.jsonl")),), template=template, tokenizer=folder)
    print("{}", file=answers, flush=True)
    for _ in sys.stdin:
        with tempfile.TemporaryDirectory() as output:
            began, busy = time.perf_counter(), sum(os.times()[:4])
            prepare_chats(config, Path(output), 1024)
            figures = {"seconds": sum(os.times()[:4]) - busy, "clock": time.perf_counter() - began}
        print(json.dumps(figures), file=answers, flush=True)


def write_chats(folder: Path, megabytes: float) -> None:
    """The files of both kinds, the tokenizer and the template of tools."""
    sys.path.insert(0, str(HERE))
    from data_speed import corpus
    from tests.support import chat_templates

    chat_templates.save_tokenizer(folder)
    (folder / "tools.jinja").write_text(chat_templates.QWEN_TOOLS, encoding="utf-8")
    lines = [line.strip() for text in corpus()[::10] for line in text.splitlines() if line.strip()]
    for kind in KINDS:
        draw, size = random.Random(0), 0
        with (folder / f"{kind}.jsonl").open("w", encoding="utf-8") as file:
            while size < megabytes * 10**6:
                row = json.dumps(conversation(draw, lines, kind))
                size += len(row) + 1
                file.write(row + "\n")


def conversation(draw: random.Random, lines: list[str], kind: str) -> dict:
    """A record of one to four turns."""
    messages = []
    for _ in range(draw.randint(1, 4)):
        said, answered = (" ".join(draw.choices(lines, k=draw.randint(1, 12))) for _ in range(2))
        messages.append({"role": "user", "content": said})
        if kind == "tools" and draw.random() < 0.5:
            call = {"type": "function", "function": {"name": "weather", "arguments": {"city": draw.choice(lines)}}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": draw.choice(lines)}]
        messages.append({"role": "assistant", "content": answered})
    return {"messages": messages} | ({"tools": TOOLS} if kind == "tools" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve[0], Path(options.serve[1]))

    from side_by_side import compare

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chats(folder, options.megabytes)
        print("kind: CPU s here, before; here / before, median of the pairs (95 %)")
        for kind in options.kinds:
            before, here = (Checkout(path.resolve(), kind, folder) for path in (options.before, HERE))
            pairs = compare(before, here, options.pairs, 1)  # `ratio` is theirs / ours, so here / before
            here.close(), before.close()
            low, high = pairs.interval
            seconds = f"{pairs.median('theirs'):.2f} {pairs.median('ours'):.2f}"
            print(f"{kind}: {seconds} {pairs.ratio:.2f} ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
