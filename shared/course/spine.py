"""Floor 0. The spine of the core: the modules that train a model from text to step, in the order in which to read them.

Less than a third of the core, read in a weekend. What is left out (masks, RoPE, the order of rows, formats of other libraries, cleaning,
tokenizers, dumps, trackers, planning, PyTorch's engine) is called by these modules or calls them. `course map --spine` prints the list. A
test holds that a module comes after every module of the spine that it imports, so that reading never jumps ahead.
"""

from dataclasses import dataclass
from pathlib import Path

from shared.course import catalogue
from shared.course.paths import CHECKOUT
from shared.course.reading import with_bodies
from shared.course.report import Line
from shared.course.stubs import BodyFile


@dataclass(frozen=True)
class Stop:
    """One module to read: its path, the minutes that it takes, and a phrase that says what to look for."""

    path: str
    minutes: int
    phrase: str

    @property
    def file(self) -> Path:
        return CHECKOUT / self.path

    @property
    def lines(self) -> int:
        """As `course read` prints the module: with the solutions' bodies in place."""
        solution = lambda contract: BodyFile.read(catalogue.chapter_of(contract.exercise).solution_file)  # noqa: E731
        return len(with_bodies(self.file, solution).splitlines())


SPINE = (
    Stop("chapters/12_grpo/one_page.py", 30, "a whole run, every wrapper inlined"),
    Stop("shared/totals.py", 5, "sums, never means, so that all splits agree"),
    Stop("shared/loss.py", 10, "cross-entropy over the tokens that count"),
    Stop("shared/loop.py", 25, "the training step: runner, reducer, updater"),
    Stop("shared/model/attention.py", 25, "grouped-query attention"),
    Stop("shared/model/block.py", 10, "norms, attention, feed-forward, residuals"),
    Stop("shared/model/transformer.py", 25, "from token ids to logits, for every family"),
    Stop("shared/model/chunked_loss.py", 20, "head and loss without ever holding all logits"),
    Stop("shared/model/sharding.py", 40, "how a parameter is cut over ranks"),
    Stop("shared/data/prepare.py", 25, "sources to clean text to tokens on disk"),
    Stop("shared/data/packing.py", 35, "documents packed into rows of one length"),
    Stop("shared/data/loader.py", 30, "micro-batches for each rank, resumed exactly"),
    Stop("shared/engine/checkpoint/folder.py", 35, "atomic checkpoints with checksums"),
    Stop("shared/engine/engine.py", 45, "the loop with what a long run needs around it"),
    Stop("shared/optim/adamw.py", 15, "AdamW's step"),
    Stop("shared/optim/muon.py", 25, "the momentum of a matrix, orthogonalised"),
    Stop("shared/optim/updater.py", 15, "divide once, clip, step; loss scaling"),
    Stop("shared/parallel/comm/communicator.py", 40, "collectives, in threads and in processes"),
    Stop("shared/parallel/mesh.py", 10, "the grid of ranks and its axes"),
    Stop("shared/parallel/data/ddp.py", 30, "gradient buckets overlapped with backward"),
    Stop("shared/parallel/data/flat.py", 45, "the flat parameter of an FSDP unit"),
    Stop("shared/parallel/data/fsdp.py", 45, "all-gather weights, reduce-scatter gradients"),
    Stop("shared/parallel/strategy.py", 30, "norms, decisions and state over many ranks"),
    Stop("shared/parallel/parallelize.py", 25, "a plain model spread over the mesh"),
    Stop("shared/parallel/tensor/operators.py", 20, "f and g: each one's derivative is the other"),
    Stop("shared/parallel/tensor/axis.py", 25, "a plain model's matrices cut over ranks"),
    Stop("shared/parallel/pipeline/runner.py", 25, "a step as any valid schedule of stages"),
    Stop("shared/moe/layer.py", 20, "each token through the experts that a router chose"),
    Stop("shared/finetune/lora.py", 20, "a frozen matrix with a trained low-rank addition"),
    Stop("shared/preference/objective.py", 20, "a policy trained on pairs: DPO and its relatives"),
    Stop("shared/rl/grpo.py", 25, "a policy trained on its own tries: advantages, weights, loss"),
    Stop("shared/trainer/run.py", 40, "from a configuration to a report"),
)


def spine_lines() -> list[Line]:
    """The text of `course map --spine`."""
    counts = {stop: stop.lines for stop in SPINE}
    hours = sum(stop.minutes for stop in SPINE) / 60
    width = max(len(stop.path) for stop in SPINE)
    heading = f"The spine of the core: {len(SPINE)} modules in reading order, {sum(counts.values()):,} lines, about {hours:.0f} hours"
    lines = [Line(heading, "bold"), Line(), Line(f"lines  min  {'module':<{width}}  what to look for", "bold")]
    lines += [Line(f"{counts[stop]:>5}  {stop.minutes:>3}  {stop.path:<{width}}  {stop.phrase}", hang=width + 14) for stop in SPINE]
    return [*lines, Line(), Line("Counted with the exercises' bodies, as `course read shared.loop --reveal` prints a module.")]
