"""The planner's predictions beside published figures, and chapter 12's PUBLISHED.md.

python tests/benchmarks/published_runs.py           print the tables (a minute or two)
python tests/benchmarks/published_runs.py --write   write the page
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from shared.course.paths import CHECKOUT  # noqa: E402
from shared.model.families import PRESETS  # noqa: E402
from shared.moe.config import MixtureModelConfig  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402
from shared.parallel.config import ParallelConfig, parse_layout  # noqa: E402
from shared.parallel.data.zero import bytes_held  # noqa: E402
from shared.trainer.config import DataConfig, TrainerConfig  # noqa: E402
from shared.trainer.planner.hardware import DEVICES, Hardware  # noqa: E402
from shared.trainer.planner.plan import Plan, plan_run  # noqa: E402

PAGE = CHECKOUT / "chapters" / "12_grpo" / "PUBLISHED.md"


def gpt(hidden: int, layers: int, heads: int) -> MixtureModelConfig:
    """Megatron's GPT: learned positions, 51,200 tokens, rows of 2,048."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * hidden}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "vocab_size": 51200, "max_position_embeddings": 2048}
    return MixtureModelConfig(**PRESETS["gpt3-small"] | quiet | sizes)


def llama(name: str, **more) -> MixtureModelConfig:
    return MixtureModelConfig(**PRESETS[name] | more)


LLAMA_405B = llama("llama-3.1-70b", num_hidden_layers=126, hidden_size=16384, num_attention_heads=128, intermediate_size=53248)


@dataclass(frozen=True)
class Run:
    """A published run. batch: rows of a step, of all ranks; micro: of a micro-batch. figure: what was published, in `unit`. reason: of a
    miss."""

    name: str
    source: str
    model: MixtureModelConfig
    hardware: Hardware
    layout: str
    seq: int
    batch: int
    micro: int
    recompute: str
    figure: float
    unit: str
    schedule: tuple[str, int] = ("1f1b", 1)
    reshard: bool = True

    @property
    def config(self) -> TrainerConfig:
        parallel = ParallelConfig(
            activation_checkpointing=self.recompute, pipeline_schedule=self.schedule[0], pipeline_chunks=self.schedule[1],
            reshard_after_forward=self.reshard,
        )
        return TrainerConfig(
            precision="bfloat16", model=self.model, optimizer=OptimizerConfig("adamw"), parallel=parse_layout(self.layout, parallel),
            data=DataConfig(seq=self.seq, batch_size=self.batch, micro_batch_size=self.micro),
        )  # fmt: skip


def cards(device: str, number: int) -> Hardware:
    return Hardware(f"{number}x{device}", DEVICES[device], max(number // 8, 1), min(number, 8))


def megatron_flops(run: Run) -> float:
    """Of a step, with blocks computed twice forward (Narayanan et al. 2021, equation 3)."""
    h, layers, vocab = run.model.hidden_size, run.model.num_hidden_layers, run.model.vocab_size
    return 96 * run.batch * run.seq * layers * h**2 * (1 + run.seq / (6 * h) + vocab / (16 * layers * h))


UNITS = {
    "TFLOP/s": lambda run, plan: megatron_flops(run) / plan.seconds.total / plan.ranks / 1e12,
    "tokens/s": lambda run, plan: plan.tokens_per_second / plan.ranks,
    "MFU, %": lambda run, plan: 100 * plan.mfu,
    "model TFLOP/s": lambda run, plan: plan.mfu * plan.peak / plan.ranks / 1e12,
}
MEGATRON = [  # billions, heads, width, layers, tp, pp, GPUs, batch, TFLOP/s of a GPU
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138), (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135), (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148), (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163), (1008, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]  # fmt: skip


def megatron() -> Iterator[Run]:
    for size, heads, hidden, layers, tp, pp, ranks, batch, figure in MEGATRON:
        layout = "_".join(f"{axis}{n}" for axis, n in (("pp", pp), ("dp", ranks // tp // pp), ("tp", tp)) if n > 1)
        model = gpt(hidden, layers, heads)
        yield Run(
            f"GPT {size:g}B", "Narayanan et al. 2021, table 1", model, cards("A100", ranks), layout, 2048, batch, 1, "full", figure,
            "TFLOP/s",
        )  # fmt: skip


KORTHIKANTI = [  # name, heads, width, layers, pp, GPUs, batch, micro, chunks; seconds with full and with selective recomputation; MFU of it
    ("22B", 64, 6144, 48, 1, 8, 4, 4, 1, 1.42, 1.10, 41.5), ("175B", 96, 12288, 96, 8, 64, 64, 1, 3, 18.13, 13.75, 51.4),
    ("530B", 128, 20480, 105, 35, 280, 280, 1, 3, 49.05, 37.83, 56.0), ("1T", 160, 25600, 128, 64, 512, 512, 1, 1, 94.42, 71.49, 56.3),
]  # fmt: skip


def korthikanti() -> Iterator[Run]:
    """One replica of each model, tensor parallel over eight. The MFU of full recomputation follows from the seconds of both."""
    for name, heads, hidden, layers, pp, ranks, batch, micro, chunks, full, selective, mfu in KORTHIKANTI:
        stages = f"pp{pp}_" if pp > 1 else ""
        for how, layout, figure in (("selective", "tp8_sp", mfu), ("full", "tp8", round(mfu * selective / full, 1))):
            yield Run(
                f"GPT {name}, {how}", "Korthikanti et al. 2022, tables 3 and 5", gpt(hidden, layers, heads), cards("A100", ranks),
                stages + layout, 2048, batch, micro, how, figure, "MFU, %", ("interleaved", chunks) if chunks > 1 else ("1f1b", 1),
            )  # fmt: skip


def others() -> Iterator[Run]:
    titan, table = "torchtitan, December 2024, table", "torchtitan, June 2025, asynchronous TP"
    eight, seventy = llama("llama-3.1-8b"), llama("llama-3.1-70b")
    yield Run("Llama 3.1 8B", f"{titan} 1", eight, cards("H100", 8), "fsdp8", 8192, 16, 2, "selective", 6667, "tokens/s")
    yield Run("Llama 3.1 8B", f"{titan} 3", eight, cards("H100", 128), "fsdp128", 8192, 256, 2, "selective", 6514, "tokens/s")
    yield Run("Llama 3.1 8B", table, eight, cards("H100", 64), "fsdp8_tp8_sp", 8192, 96, 12, "selective", 4378, "tokens/s")
    yield Run("Llama 3.1 70B", table, seventy, cards("H100", 256), "fsdp32_tp8_sp", 8192, 512, 16, "full", 597.3, "tokens/s")
    for ranks, layout, seq, batch, figure in (
        (8192, "pp16_fsdp64_tp8_sp", 8192, 2048, 430), (16384, "pp16_fsdp128_tp8_sp", 8192, 2048, 400),
        (16384, "pp16_fsdp8_cp16_tp8_sp", 131072, 128, 380),
    ):  # fmt: skip
        yield Run(
            "Llama 3 405B", "Llama team 2024, table 4", LLAMA_405B, cards("H100", ranks), layout, seq, batch, 1, "none", figure,
            "model TFLOP/s", ("interleaved", 4), reshard=False,
        )  # fmt: skip
    for how, layout, figure in (("selective", "pp35_dp8_tp8_sp", 54.2), ("full", "pp35_dp8_tp8", 42.1)):
        yield Run(
            "GPT 530B", "Korthikanti et al. 2022, abstract", gpt(20480, 105, 128), cards("A100", 2240), layout, 2048, 2240, 1, how, figure,
            "MFU, %",
        )  # fmt: skip


def calibrated(run: Run) -> float:
    """The efficiency with which a device's row is predicted exactly: what is not products is no faster on a faster device."""
    device, low, high = run.hardware.device, 0.1, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        plan = plan_run(run.config, replace(run.hardware, device=replace(device, efficiency=middle)))
        low, high = (middle, high) if UNITS[run.unit](run, plan) < run.figure else (low, middle)
    return (low + high) / 2


def predicted(run: Run) -> tuple[Plan, float]:
    plan = plan_run(run.config, run.hardware)
    return plan, UNITS[run.unit](run, plan)


GIB = 2**30
PARTS = ("products", "again", "bubble", "exchange", "optimizer")
CALIBRATION = ("GPT 1.7B", "torchtitan, December 2024, table 1")
MEASURED_GIB = {"torchtitan, December 2024, table 1": 77.0, "torchtitan, December 2024, table 3": 62.0}
REASONS = {  # by the name of a run: of misses
    "GPT 7.5B": "one constant for all widths, and what tensor parallelism sends is taken to hide nothing",
    "GPT 18.4B": "the same", "GPT 39.1B": "the same; Megatron also cuts messages between machines over the tensor-parallel ranks",
    "GPT 76.1B": "the same", "GPT 145.6B": "the same, and 1F1B is planned where Megatron interleaved",
    "GPT 310.1B": "the same", "GPT 529.6B": "the same: wide products reach more of the peak", "GPT 1008B": "the same",
    "Llama 3 405B": "theirs had eight chunks of one block and ends without blocks, planned are four of two; and the constant is of cards "
    "held at 500 W, theirs had 700 W",
    "GPT 530B": "as above; the rows of a step are those of table 1, eight replicas of 280",
    "GPT 22B to 1T of Korthikanti et al.": "the constant is that of a width of 2,304, these are 6,144 to 25,600 wide. What full "
    "recomputation costs beside selective does not depend on it: 1.27 to 1.29 times the seconds are planned, 1.29 to 1.32 were measured",
}  # fmt: skip


def speed_table() -> Iterator[str]:
    yield f"| run | source | cards | layout | published | predicted | miss | shares: {', '.join(PARTS)} |"
    yield "|" + "---|" * 8
    for run in [*megatron(), *others(), *korthikanti()]:
        plan, value = predicted(run)
        parts = ", ".join(f"{plan.seconds.parts[name] / plan.seconds.total:.0%}" for name in PARTS)
        miss = "calibration" if run.name in CALIBRATION or run.source in CALIBRATION else f"{value / run.figure - 1:+.0%}"
        about = f"{run.name} | {run.source} | {run.hardware.name} | {run.layout}"
        yield f"| {about} | {run.figure:,g} {run.unit} | {value:,.0f} | {miss} | {parts} |"


def memory_table() -> Iterator[str]:
    yield "| run | source | published, GiB | predicted, GiB | miss |"
    yield "|---|---|---|---|---|"
    for run in others():
        if (figure := MEASURED_GIB.get(run.source)) is not None:
            held = plan_run(run.config, run.hardware).held
            value = (held.peak - held.loss) / GIB  # short-lived buffers are those of this course's chunked loss
            yield f"| {run.name}, {run.layout} | {run.source} | {figure:.1f} | {value:.1f} | {value / figure - 1:+.1%} |"
    for stage, figure in enumerate((120, 31.4, 16.6, 1.9)):
        value = sum(bytes_held(7.5e9, 64, stage, 2, 2, 12).values()) / 1e9
        name = f"7.5B, {f'ZeRO-{stage}' if stage else 'replicas'} over 64 ranks, GB"
        yield f"| {name} | Rajbhandari et al. 2020, figure 1 | {figure:g} | {value:.1f} | {value / figure - 1:+.1%} |"


def reasons() -> Iterator[str]:
    return (f"- {name}: {reason}." for name, reason in REASONS.items())


TEXT = """\
# Published runs beside the planner's predictions

`python tests/benchmarks/published_runs.py --write` writes this page. Nothing is fitted but one constant for each device, the share of its
peak that products reach, each from a single row: an A100's from the first row of Narayanan et al. 2021, table 1 ({A100:.3f}), an H100's
from torchtitan's table 1 with `torch.compile` ({H100:.3f}; these cards were held at 500 W). It is the same for every model and layout.
Latencies of a hop are NCCL's own constants, bandwidths the data sheets'. No run of the course's own code on such cards stands behind these
figures.

Megatron's TFLOP/s count blocks twice forward (its equation 3); the Llama team's do not. Of full recomputation Korthikanti et al. give
seconds; its MFU here is that of selective recomputation times the ratio of the seconds. Their selective recomputation computes scores again
and keeps the rest; what is planned is this course's, which keeps products and computes the rest again.

## Speed

{SPEED}

Likely reasons of the misses:

{REASONS}

## Memory

{MEMORY}

torchtitan's runs keep float32 weights, gradients and state and gather bfloat16 ones, as ours do. Figures whose layout is not published
(hours of Llama 2's training, for instance) or that could not be checked against their source are left out.

Sources: Narayanan et al. 2021, arXiv 2104.04473; Korthikanti et al. 2022, arXiv 2205.05198; Rajbhandari et al. 2020, arXiv 1910.02054;
Llama team 2024, arXiv 2407.21783; torchtitan's repository, folder benchmarks (llama3_h100_202412_torchtitan.md, and the page on
asynchronous tensor parallelism).
"""


def page() -> str:
    tables = {"SPEED": speed_table(), "MEMORY": memory_table(), "REASONS": reasons()}
    constants = {name: DEVICES[name].efficiency for name in ("A100", "H100")}
    return TEXT.format(**{name: "\n".join(lines) for name, lines in tables.items()}, **constants)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page())
