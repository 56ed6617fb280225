"""Train on the pretended cards, and on the CPU beside them: `python tests/gpu/pretended_cuda/train.py RESULT.json CASE.json`.

CASE.json is a list of cases, each {"words": [...], "ranks": n}: a configuration's file and its overrides. A case runs twice: with
engine.device=cuda in the folder that the words name, and with engine.device=cpu in the folder beside it with "-cpu" at its end. Ranks are
threads, each with a card of its own. RESULT.json gets for each case the waits of its last step that is neither logged nor saved, those of
all sampling, its forward passes and its collectives, the calls of the kernel for variable lengths, and the losses of both runs.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "support"), str(TESTS.parent)]

from pretended_cuda import backend  # noqa: E402

LIBRARY = backend.start()

import torch  # noqa: E402
from pretended_cuda.waits import Waits, count_hidden  # noqa: E402
from rich.console import Console  # noqa: E402
from varlen_stand_in import stand_in  # noqa: E402

from shared.engine.engine import RuntimeEngine  # noqa: E402
from shared.parallel.comm.communicator import Communicator  # noqa: E402
from shared.parallel.comm.threads import ThreadCommunicator, run_threads  # noqa: E402
from shared.preference.rollouts import RolloutLoader  # noqa: E402
from shared.rl.decoding_cache import DecodingCache  # noqa: E402
from shared.trainer.config import TrainerConfig  # noqa: E402
from shared.trainer.run import train_model  # noqa: E402
from shared.trainer.settings import parse_words  # noqa: E402


def on_own_card(value: Any) -> Any:
    """A tensor from another rank, copied to this rank's card: autograd has one thread for each card, and hooks that wait in it for another
    rank would never end if ranks shared one."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.device("cuda", torch.cuda.current_device())) if value.is_cuda else value
    if isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) for each in value):
        return [on_own_card(each) for each in value]
    return value


def ranks_have_cards() -> None:
    """Bring what ranks exchange to the card of the rank that gets it."""
    exchange = ThreadCommunicator.exchange

    def exchange_to_own_card(self: Any, own: Any, finish: Any) -> Any:
        return exchange(self, own, lambda inputs: finish([on_own_card(each) for each in inputs]))

    ThreadCommunicator.exchange = exchange_to_own_card


def plain_steps() -> list[Counter]:
    """Record rank 0's waits in each step that is neither logged nor saved; the list fills while a run goes on."""
    steps, after_step = [], RuntimeEngine.after_step

    def recorded(engine: RuntimeEngine) -> None:
        waits = Waits.counting
        after_step(engine)
        if waits is not None and engine.strategy.rank == 0 and not engine.log_due and engine.saved_at != engine.step:
            steps.append(Counter(waits.places))
        if waits is not None and engine.strategy.rank == 0:
            waits.places.clear()

    RuntimeEngine.after_step = recorded
    return steps


def sampling() -> Counter:
    """Record rank 0's waits, forward passes and collectives while it samples answers; the counter fills while a run goes on."""
    found, sample, start_pass = Counter(), RolloutLoader.own_answers, DecodingCache.start_pass

    def recorded(loader: RolloutLoader) -> Any:
        waits, trace = Waits.counting, loader.mesh.world.trace
        counts = waits is not None and loader.mesh.world.rank == 0
        before = Counter(waits.places) if counts else Counter()
        collectives, passes = len(trace.entries), found["all passes"]
        answers = sample(loader)
        if counts:
            found["collectives"] += len(trace.entries) - collectives
            found["passes"] += found["all passes"] - passes
            found.update({f"wait: {what} in {where}": count for (what, where), count in (waits.places - before).items()})
        return answers

    def passed(cache: DecodingCache, new: int) -> None:
        if Waits.counting is not None and torch.cuda.current_device() == 0:
            found["all passes"] += 1
        start_pass(cache, new)

    RolloutLoader.own_answers, DecodingCache.start_pass = recorded, passed
    return found


def run(words: list[str], ranks: int) -> Path:
    """Train as the words say, and return the folder of the run."""
    config = parse_words(TrainerConfig, words, lambda line: None)

    def on_rank(world: Communicator | None = None) -> None:
        torch.set_num_threads(1)
        if config.engine.device == "cpu":
            train_model(config, Console(quiet=True), world)
            return
        torch.cuda.set_device(world.rank if world else 0)
        if world is not None and world.rank:
            train_model(config, Console(quiet=True), world)
            return
        with Waits():
            train_model(config, Console(quiet=True), world)

    if ranks > 1:
        run_threads(on_rank, ranks)
    else:
        on_rank()
    return config.engine.output


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def main() -> None:
    result, cases = (Path(word) for word in sys.argv[1:])
    count_hidden()
    ranks_have_cards()
    steps, sampled, varlen, told = plain_steps(), sampling(), stand_in("cuda"), []
    for case in json.loads(cases.read_text(encoding="utf-8")):
        steps.clear()
        sampled.clear()
        varlen.clear()
        began = time.process_time()
        card = run([*case["words"], "engine.device=cuda"], case["ranks"])
        seconds, on_card, of_documents = time.process_time() - began, dict(sampled), len(varlen)
        host = run([*case["words"], "engine.device=cpu", f"engine.output={card}-cpu"], case["ranks"])
        waits = [[count, what, where] for (what, where), count in steps[-1].most_common()]
        found = {"waits": waits, "sampling": on_card, "card": losses(card), "host": losses(host)}
        told.append(found | {"varlen": of_documents, "seconds": seconds, "peak": LIBRARY.pretended_cuda_peak()})
        result.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
