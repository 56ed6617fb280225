"""Chapter 12. Time of a step: products, the pipeline's bubble, exposed communication, the optimizer, and generation.

    products      FLOPs / (efficiency * peak)
    a pipeline    its schedule, simulated with each stage's own time (`shared.parallel.pipeline.simulate`)
    optimizer     bytes of weights, gradients and state that it reads and writes / bandwidth, and Muon's products
    a token       the longer of reading weights and cache once, and its products

Left out on purpose: the time to start kernels, which rules for small models; norms and activations, which the efficiency stands for; and
that narrow products reach less of a peak.
"""

from dataclasses import dataclass, fields

from shared.model.counting import parameter_counts
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.pipeline.simulate import Times, make_timeline
from shared.parallel.planning.activations import WIDTH, model_of_rank, whole_of
from shared.parallel.planning.costs import cost
from shared.parallel.planning.data_costs import Weight
from shared.parallel.planning.memory import StepSizes, data_shards
from shared.parallel.planning.pipeline_costs import chunk_parts, held_parts, hidden_bytes
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.flops import Flops, Trained, muon_flops, part_flops
from shared.trainer.planner.hardware import Hardware
from shared.trainer.planner.memory import base_bits, reward_model_setting
from shared.trainer.planner.traffic import GRADIENTS, RINGS, SHARDS, Sent, own_weights, seconds_of, stride_of
from shared.trainer.sections import ROLLING

WITHIN = ("tp", "ep")  # axes whose operations every micro-batch waits for


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, one after another, on the rank that has most to do; of rollouts, a step's share.

    products: forward and backward. again: recomputed blocks. bubble: a pipeline's ranks wait. exchange: communication that nothing hides.
    optimizer: its step. scoring: passes of the policy, a reference and a reward model. drawing: answers, token by token. hidden: seconds of
    communication beside products, which are no part of the sum.
    """

    products: float
    again: float
    bubble: float
    exchange: float
    optimizer: float
    scoring: float = 0.0
    drawing: float = 0.0
    hidden: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "hidden"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_seconds(
    config: TrainerConfig, hardware: Hardware, step: StepSizes, trained: Trained, traffic: list[list[Sent]]
) -> StepSeconds:
    """hardware: of a rank. traffic: of each stage (`stage_traffic`)."""
    layout, speed = config.parallel, hardware.speed(step.precision)
    own, tokens = model_of_rank(config.model, layout), step.rows * step.seq // layout.context_parallel
    recompute = layout.activation_checkpointing == "full"
    stages = layout.pipeline_parallel
    by_rank = chunk_parts(config.model, layout)
    chunks = [[part_flops(own, part, step.seq, trained, recompute).times(tokens / speed) for part in parts] for parts in by_rank]
    works = [Flops.total(of) for of in chunks]
    worst = max(range(stages), key=lambda stage: works[stage].needed + works[stage].again + seconds_of(traffic[stage], axes=WITHIN))
    work, sent, m = works[worst], traffic[worst], step.microbatches
    exposed, hidden = exchange_seconds(work, sent, step, layout.zero == 2)
    bubble = bubble_seconds(config, hardware, step, chunks, traffic) if stages > 1 else 0.0
    scoring, drawing = rollout_seconds(config, hardware, step)
    return StepSeconds(
        m * work.needed, m * work.again, bubble, exposed, optimizer_seconds(config, hardware, step, trained), scoring, drawing, hidden
    )


def exchange_seconds(work: Flops, sent: list[Sent], step: StepSizes, each_time: bool) -> tuple[float, float]:
    """Exposed and overlapped communication of a rank, seconds. work: of a micro-batch. each_time: gradients are reduced after each
    micro-batch. A pipeline's messages are in its simulation."""
    rooms = {
        GRADIENTS: work.backward * (step.microbatches if each_time else 1),
        SHARDS: step.microbatches * (work.needed + work.again),
        RINGS: step.microbatches * work.attention,
    }
    exposed = sum(each.seconds for each in sent if not each.beside and not is_message(each))
    hidden = 0.0
    for beside, room in rooms.items():
        own = [each for each in sent if each.beside == beside]
        seconds = sum(each.seconds for each in own)
        last = max((each.seconds / each.calls for each in own if each.calls), default=0.0) if beside != RINGS else 0.0
        left = min(max(seconds - room, last), seconds)  # what comes last has nothing to travel beside
        exposed, hidden = exposed + left, hidden + seconds - left
    return exposed, hidden


def is_message(each: Sent) -> bool:
    return each.part == "hidden states"


def bubble_seconds(
    config: TrainerConfig, hardware: Hardware, step: StepSizes, chunks: list[list[Flops]], traffic: list[list[Sent]]
) -> float:
    """The pipeline's bubble beyond the work of the busiest rank: the schedule is simulated, with the messages between stages. Of many
    micro-batches only the first ones are: each further one takes as long as the dearest rank works on it."""
    layout, m = config.parallel, step.microbatches
    ranks, count = layout.pipeline_parallel, layout.pipeline_chunks
    shown = min(m, 4 * ranks * count + m % ranks)
    within = [seconds_of(each, axes=WITHIN) / m / count for each in traffic]
    stages = [chunks[stage % ranks][stage // ranks] for stage in range(ranks * count)]
    seconds = [each.needed + each.again + within[stage % ranks] for stage, each in enumerate(stages)]
    mean = sum(seconds) / len(seconds)
    forward = sum(each.forward for each in stages) / sum(seconds) + sum(within) * count / 2 / sum(seconds)
    weight = 0.0 if config.adapter else sum(each.backward for each in stages) / 2 / sum(seconds)
    link = hardware.link(stride_of("pp", layout), 2)
    transfer = link.latency + hidden_bytes(config.model.resolved(), layout, step) / link.bandwidth
    times = Times(forward * mean, (1 - forward - weight) * mean, weight * mean, transfer, tuple(each / mean for each in seconds))
    timeline = make_timeline(make_schedule(layout.pipeline_schedule, ranks, shown, count), shown, count, times)
    busiest = max(sum(seconds[rank::ranks]) for rank in range(ranks))
    return timeline.seconds - shown * busiest


def optimizer_seconds(config: TrainerConfig, hardware: Hardware, step: StepSizes, trained: Trained) -> float:
    """Weights are read and written, gradients read twice (their norm), state read and written; Muon multiplies matrices besides."""
    layout, own = config.parallel, model_of_rank(config.model, config.parallel)
    cut = data_shards(layout) if layout.zero or layout.fully_sharded > 1 else 1
    muon, slowest = config.optimizer.name == "muon", 0.0
    for part in held_parts(config.model, layout):
        weights = [each for each in own_weights(config, part, trained) if each.trained]
        moved = sum(bytes_moved(each, config.optimizer.name) for each in weights) / cut
        products = muon_flops(own, part, config.optimizer.newton_schulz_steps) / cut if muon and not trained.is_adapter else 0.0
        speed = hardware.speed(config.optimizer.newton_schulz_dtype or ("float32" if step.precision == "float32" else "bfloat16"))
        slowest = max(slowest, moved / hardware.device.bandwidth + products / speed)
    return slowest


def bytes_moved(weight: Weight, optimizer: str) -> float:
    state = 4 if optimizer in ("lion", "sgd") or (optimizer == "muon" and weight.matrix) else 8
    return weight.numbers * (2 * 4 + 2 * 4 + 2 * state)


def rollout_seconds(config: TrainerConfig, hardware: Hardware, step: StepSizes) -> tuple[float, float]:
    """A step's share of scoring and drawing, where every prompt and answer is as long as it may be. With DPO, of the reference's pass over
    each pair, which it makes once."""
    layout, speed = config.parallel, hardware.speed(step.precision)
    own = model_of_rank(config.model, layout)
    flops = part_flops(own, whole_of(own), step.seq, Trained(), recompute=False)
    stages = layout.pipeline_parallel
    tokens = step.rows * step.seq * step.microbatches
    forward = tokens * flops.forward / speed / stages
    if config.mode == "dpo":
        return (forward if config.dpo.needs_reference else 0.0), 0.0
    if config.mode not in ROLLING:
        return 0.0, 0.0
    sizes = getattr(config, config.mode)
    uses = sizes.passes  # of the rows of a rollout
    reference = config.mode == "ppo" or config.grpo.reference
    scoring = forward * (1 + reference + (reward_model_setting(config) is not None)) / uses
    share = sizes.prompts * sizes.answers / layout.data_ranks
    rows, prompt = min(sizes.rows, share), max(config.data.seq - sizes.new_tokens, 1)
    counts = parameter_counts(own)
    kept = WIDTH[step.precision] if layout.fully_sharded > 1 else 4
    if config.adapter and config.adapter.base != "float":
        kept = base_bits(config) / 8
    weights = kept * counts["matrix"] + 4 * counts["expert"] + 4 * own.vocab_size * own.hidden_size
    each = 2 * own.num_key_value_heads * own.head_dim * own.num_hidden_layers * WIDTH[step.precision]
    cache = rows * (prompt + sizes.new_tokens / 2) * each
    short = part_flops(own, whole_of(own), prompt + sizes.new_tokens // 2, Trained(), recompute=False).forward
    token = max((weights + cache) / hardware.device.bandwidth, rows * short / speed)
    if layout.tensor_parallel > 1:
        one = cost("all_reduce", rows * own.hidden_size * WIDTH[step.precision], layout.tensor_parallel)
        token += (2 * own.num_hidden_layers + 2) * one.seconds(hardware.link(1, layout.tensor_parallel))
    prefill = share / sizes.answers * prompt * short / speed
    drawing = share / rows * sizes.new_tokens * token + prefill
    return scoring, drawing / (sizes.passes * sizes.minibatches)

