"""The sandbox's table of hostile programs: `python tests/rl/hostile_table.py` runs all of them, `--write` makes the chapter's page."""

import argparse
import platform

from hostile_runs import Hostile, Tried, hostile_programs, try_all

from shared.course.paths import CHECKOUT
from shared.rl.code_reward import CodeReward

PAGE = CHECKOUT / "chapters" / "12_grpo" / "SANDBOX.md"
HEAD = """# The sandbox and the programs that attack it

A reward on code runs what a model wrote. `shared/rl/sandbox/` runs each program in a process of its own, as an unprivileged user,
behind a filter of system calls (seccomp) and limits, and in namespaces of its own where the kernel allows them. A run says at its start
which of these hold, after a program has tried at each worker's start what must not be possible. Where the filter cannot be had, as on
macOS, no program is run at all.

The expected values never enter the sandbox. A program sends what its function returned, as JSON, and the trainer compares. So a program
cannot read the right answers, and has no verdict to forge: whatever it writes is a claim of values, no better than a guess.

What is **not** guaranteed:

- An error of the kernel in one of the system calls that the filter lets through opens the sandbox. In namespaces these are about 70,
  without them about 45.
- Side channels, such as time, caches and the load of the machine, are not closed.
- A program that returns the right values by a table of the cases' inputs has its reward: many cases, and held-out ones, are the answer
  to that.
- Several programs at a time use several processors, and each takes memory up to its limit.
- On aarch64 the filter's numbers are compared with the kernel's header, but this table was never run there.

## The table

`python tests/rl/hostile_table.py --write` ran every program below through one worker, an honest program after each, and wrote this page
(Linux {kernel}, {machine}, Python {python}). The honest one was judged right all {count} times on both levels; the secret file, the
folder, the port and the other processes were as before.

"refused" means that the kernel refused what the program tried, after which it answered rightly. "right" means that the attack came to
nothing and the answer was right. Both have the reward 1, everything else has 0. Some programs end in one way or another by chance or by
the version of Python; this is how they ended in this run.

| group | what the program does | with namespaces | filter alone |
|---|---|---|---|
"""


def verdict_rows(programs: list[Hostile], inside: list[Tried] | None, alone: list[Tried] | None) -> list[str]:
    """The table's lines; without results, their first two columns and dashes."""
    rows = []
    for number, hostile in enumerate(programs):
        verdicts = [found[number].verdict if found else "-" for found in (inside, alone)]
        rows.append(f"| {hostile.group} | {hostile.name} | {verdicts[0]} | {verdicts[1]} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the chapter's page")
    write = parser.parse_args().write
    programs = hostile_programs()
    inside, alone = try_all(programs, namespaces=True), try_all(programs, namespaces=False)
    for found in (inside, alone):
        for hostile, result in zip(programs, found, strict=True):
            if result.harm or result.honest != 1.0:
                raise SystemExit(f"{hostile.name}: {result}")
    reward = CodeReward()
    said = reward.describe()
    reward.close()
    if "network" not in said:
        raise SystemExit(f"This machine has no namespaces, so the page cannot be made here. {said}")
    rows = verdict_rows(programs, inside, alone)
    print("\n".join(rows))
    if write:
        kernel, python = platform.release().split("-")[0], platform.python_version()
        head = HEAD.format(kernel=kernel, machine=platform.machine(), python=python, count=len(programs))
        PAGE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
