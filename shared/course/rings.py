"""Floor 0. The three rings of `shared/`: the spine, the core and what is around it.

The spine trains a model from text to step, in reading order: a module comes after every module of the spine that it imports, so that
reading never jumps ahead. The core is all that trains, in any layout, from text to GRPO. Around it stands what makes training a product;
the core imports none of that, but for a few imports that `tests/course/test_rings.py` lists with their reasons.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from shared.course import catalogue
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.course.reading import size_of, with_bodies
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
    Stop("shared/model/block.py", 15, "norms, attention, feed-forward, residuals; the stack"),
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
    Stop("shared/rl/grpo.py", 25, "a policy trained on its own samples: advantages, weights, loss"),
    Stop("shared/trainer/run.py", 40, "from a configuration to a report"),
)


AROUND = {  # folder or module of `shared/` -> what it is for; a module that no line names, in this table or the spine, is core
    "finetune/gguf": "llama.cpp's format, read and written, with the tokenizer in it",
    "finetune/memory_costs": "memory of adapters and of a quantized base, for the planner",
    "finetune/peft_format": "adapters in peft's format",
    "finetune/peft_layers": "... which of peft's layers is which of ours",
    "finetune/quantization/nf4_files": "bitsandbytes' NF4 format",
    "finetune/quantization/packed_files": "GPTQ's and AWQ's packed formats, written and read",
    "parallel/planning": "memory, traffic and FLOPs of a layout, for the planner",
    "parallel/commands": "`course doctor`",
    "parallel/processes/machines": "... of several machines: their links and folders",
    "rl/sandbox": "code of a model, run in isolation",
    "trainer/commands": "the trainer's part of the command line",
    "trainer/evaluation": "benchmarks, bits per byte, pass@k",
    "trainer/data_check": "a look at a data file before training",
    "trainer/export_command": "`course export`",
    "trainer/card": "a model card for the hub, and the names of base models",
    "trainer/export": "a trained model and its adapter as files of other libraries",
    "trainer/launch": "local processes, elastic runs, dry runs",
    "trainer/pipeline": "pretraining, SFT and RL chained as stages",
    "trainer/planner": "memory, traffic and time predicted; layout search; scaling law",
    "trainer/records": "event log, run records, resumed with changes",
    "trainer/reports": "pages, figures and lists of runs",
    "trainer/results": "what is measured and reported when a run ends",
    "trainer/talk": "chat in the terminal and in the browser",
}
SPINE_RING, CORE_RING, AROUND_RING = RINGS = ("spine", "core", "around it")


def ring_of(module: str) -> str:
    """The ring of a module such as "shared.loop"."""
    if module in {catalogue.module_name(stop.file) for stop in SPINE}:
        return SPINE_RING
    return AROUND_RING if any(is_in(module, name) for name in AROUND) else CORE_RING


def is_in(module: str, name: str) -> bool:
    """Whether a line of `AROUND` names a module, or a folder that holds it."""
    return f"{module}.".startswith(f"shared.{name.replace('/', '.')}.")


def unknown() -> list[str]:
    """Lines of `AROUND` that name no module or folder of `shared/`, or one of the spine."""
    modules = [catalogue.module_name(path) for path in catalogue.core_files()]
    return [name for name in AROUND if {AROUND_RING} != {ring_of(module) for module in modules if is_in(module, name)}]


def ring_lines() -> list[Line]:
    """The text of `course map --rings`: modules and lines by ring, and of each part of what is around the core.

    Raises:
        CourseError: the table names what is not there.
    """
    if wrong := unknown():
        raise CourseError(f"AROUND in shared/course/rings.py names {', '.join(wrong)}, which is no module around the core.")
    sizes = {name: Counter() for name in (*RINGS, *AROUND)}
    for path in catalogue.core_files()[1:]:  # without the package itself, which is of no chapter
        module = catalogue.module_name(path)
        for name in (ring_of(module), *(name for name in AROUND if is_in(module, name))):
            sizes[name] += size_of(path)
    width = max(map(len, AROUND)) + 2

    def row(name: str, shown: str, phrase: str) -> Line:
        size = sizes[name]
        numbers = f"{size['modules']:>8,}{size['lines']:>8,}{size['code']:>9,}"
        return Line(f"{shown:<{width}}{numbers}  {phrase}".rstrip(), hang=width)

    said = ("a text becomes a trained model; `course map --spine` lists it", "all that trains, in any layout, from text to GRPO", "")
    lines = [Line("The three rings of the core", "bold"), Line()]
    lines += [Line(f"{'ring':<{width}}{'modules':>8}{'lines':>8}{'of code':>9}", "bold")]
    lines += [row(name, name, phrase) for name, phrase in zip(RINGS, said, strict=True)]
    return [*lines, *(row(name, f"  {name}", phrase) for name, phrase in AROUND.items())]


def spine_lines() -> list[Line]:
    """The text of `course map --spine`."""
    counts = {stop: stop.lines for stop in SPINE}
    hours = sum(stop.minutes for stop in SPINE) / 60
    width = max(len(stop.path) for stop in SPINE)
    heading = f"The spine of the core: {len(SPINE)} modules in reading order, {sum(counts.values()):,} lines, about {hours:.0f} hours"
    lines = [Line(heading, "bold"), Line(), Line(f"lines  min  {'module':<{width}}  what to look for", "bold")]
    lines += [Line(f"{counts[stop]:>5}  {stop.minutes:>3}  {stop.path:<{width}}  {stop.phrase}", hang=width + 14) for stop in SPINE]
    return [*lines, Line(), Line("Counted with the exercises' bodies, as `course read shared.loop --reveal` prints a module.")]
