"""Chapter 12. Advice on a plan: settings that would let a run fit, or make it faster, each planned itself before it is named."""

from collections.abc import Iterator
from dataclasses import replace

from shared.model.config import ModelConfig
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.hardware import Hardware
from shared.trainer.planner.plan import Plan, plan_run

WORTH = 0.98  # of the time; a smaller gain is within what the plan misses by


def advise(config: TrainerConfig, hardware: Hardware, plan: Plan, rewards: ModelConfig | None = None) -> list[str]:
    """Lines about what would help, the best first."""
    found: list[tuple[float, str]] = []
    for word, change in changes(config):
        try:
            other = plan_run(change, hardware, rewards)
        except ValueError:  # the trainer refuses it
            continue
        if all(each.counted for each in plan.memory) and not all(each.counted for each in other.memory):
            continue  # whether it fits is not known
        faster, held = other.seconds.total / plan.seconds.total, other.held.peak / 1e9
        if not plan.fits and other.held.peak < plan.held.peak:
            verdict, order = ("fits", faster) if other.fits else ("still does not fit", other.held.peak)
            found.append((order, f"{word}: {held:.1f} GB, {verdict}, {faster:.2f} times as long."))
        elif plan.fits and other.fits and faster < WORTH:
            found.append((faster, f"{word}: {held:.1f} GB, {faster:.2f} times as long."))
    return [line for _, line in sorted(found)[:3]]


def changes(config: TrainerConfig) -> Iterator[tuple[str, TrainerConfig]]:
    """Words of the command line, and the configuration with them. Those that the trainer would refuse are left out."""
    parallel, data = config.parallel, config.data
    sections = [
        (f"parallel.activation_checkpointing={how}", {"parallel": (parallel, {"activation_checkpointing": how})})
        for how in ("none", "selective", "full")
        if how != parallel.activation_checkpointing
    ]
    for rows in (data.micro_batch_size // 2, 2 * data.micro_batch_size):
        sections.append((f"data.micro_batch_size={rows}", {"data": (data, {"micro_batch_size": rows})}))
    if not parallel.zero and not parallel.fully_sharded > 1 and parallel.data_parallel > 1:
        sections.append(("parallel.zero=1", {"parallel": (parallel, {"zero": 1})}))
    if parallel.data_parallel > 1:
        cut = {"data_parallel": 1, "fully_sharded": parallel.data_ranks, "zero": 0}
        words = f"parallel.data_parallel=1 parallel.fully_sharded={parallel.data_ranks}" + " parallel.zero=0" * (parallel.zero > 0)
        sections.append((words, {"parallel": (parallel, cut)}))
    if config.adapter and config.adapter.base == "float" and config.adapter.kind == "lora":
        sections.append(("adapter.base=nf4", {"adapter": (config.adapter, {"base": "nf4"})}))
    for words, of in sections:
        try:
            yield words, replace(config, **{name: replace(section, **values) for name, (section, values) in of.items()})
        except ValueError:
            continue
