"""Everything that needs an NVIDIA GPU, in slices of at most eight minutes each: `python tests/gpu/run.py`, or `make gpu`.

python tests/gpu/run.py                      all slices that have no result of this code and this machine yet
python tests/gpu/run.py --list               what there is, what has a result, and which packages are missing
python tests/gpu/run.py --slice attention    one of them (may be given several times)
python tests/gpu/run.py --again              also those that have a result
python tests/gpu/run.py --write              put the table of the results into tests/benchmarks/README.md
python tests/gpu/run.py --device cpu --size small      start each slice without a GPU: nothing is measured, and nothing counts as held

Results go into runs/gpu/results.json after each slice, so a run that was stopped continues with the next one. A slice that fails (an
exception, a claim that does not hold, no memory, more than eight minutes) is recorded with its error, and the others run.
"""

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]

import gpu_packages  # noqa: E402

if __name__ == "__main__":
    gpu_packages.require()  # before anything that imports them

import gpu_day  # noqa: E402
import gpu_runner  # noqa: E402
from gpu_table import README, table, write_into  # noqa: E402
from slices import SLICES, sentence_of  # noqa: E402


def main(words: list[str] | None = None) -> int:
    """0 where every slice that was asked for ran and all its claims held; 1 otherwise; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", action="append", choices=SLICES, dest="slices", help="only this one; may be given several times")
    parser.add_argument("--list", action="store_true", help="say what there is and stop")
    parser.add_argument("--again", action="store_true", help="run a slice although it has a result")
    parser.add_argument("--write", action="store_true", help="write the table into the benchmarks' README")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--output", type=Path, default=FOLDER.parents[1] / "runs" / "gpu", help="the folder of results.json and table.md")
    asked = parser.parse_args(words)
    if asked.device == "cuda" and not asked.list and not gpu_runner.gpu_is_there():
        print("PyTorch finds no CUDA GPU here. `--device cpu --size small` starts each slice without one.", file=sys.stderr)
        return 2
    runner = gpu_runner.Runner(asked.output, asked.device, asked.size)
    if asked.list:
        show_list(runner)
        return 0
    chosen = [name for name in SLICES if name in (asked.slices or SLICES)]
    print(gpu_day.opening(chosen, sentence_of, runner.limit / 60, gpu_day.nvidia_smi), flush=True)
    ended = [runner.result(name, asked.again) for name in chosen]
    written = gpu_day.about(gpu_day.nvidia_smi) + "\n" + table(runner.records(), sentence_of)
    (asked.output / "table.md").write_text(written, encoding="utf-8")
    if asked.write:
        write_into(README, written)
    failed = [name for name, record in zip(chosen, ended, strict=True) if record["state"] == "failed"]
    print(f"\n{len(chosen) - len(failed)} of {len(chosen)} slices without a failure. {asked.output / 'results.json'}")
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return int(bool(failed))


def show_list(runner: gpu_runner.Runner) -> None:
    for name in SLICES:
        record = runner.kept(name)
        print(f"{name:12} {record['state'] if record else 'not run':8} {sentence_of(name)}")
    print("\n" + gpu_packages.in_words())


if __name__ == "__main__":
    sys.exit(main())
