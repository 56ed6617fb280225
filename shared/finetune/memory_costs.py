"""Chapter 10. Memory of LoRA and QLoRA by formula: a frozen base in 32, 16 or about 4 bits, and adapters that are trained over it.

    full fine-tuning    16 bytes a weight (float32, gradient, AdamW's two means), and 2 more where products are in 16 bits
    LoRA                4 or 2 bytes a weight of the base, and 16 a number of the adapters
    QLoRA               4.127 bits a weight of the blocks' matrices; 4 bytes in embeddings, norms and head

A frozen linear layer keeps nothing of its input; its adapter does, and r numbers of each token more. What does not change is counted in
`shared.parallel.planning.activations`.

Left out on purpose: pipelines, experts, and adapters other than low-rank updates without dropout.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shared.finetune.quantization.frozen import AT_ONCE
from shared.model.config import ModelConfig
from shared.model.counting import block_counts, parameter_counts
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig
from shared.parallel.data.zero import bytes_held
from shared.parallel.planning.activations import WIDTH, heads, model_of_rank, require_formula, saved_per_token, token_bytes
from shared.parallel.planning.memory import MemoryEstimate, StepSizes, data_shards

NF4_BITS = {False: 4 + 32 / 64, True: 4 + 8 / 64 + 32 / (64 * 256)}
"""Of a weight, with double quantization or without."""


def packed_bits(bits: int, group: int | None) -> float:
    """Of a weight in packed codes: a group has a float16 scale and a zero point of a byte; for whole rows they count as nothing."""
    return bits + 24 / group if group else bits


@dataclass(frozen=True)
class FrozenBase:
    """A frozen base and what is trained over it.

    rank: r of the updates. targets: the linear layers of a block that have one: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj. bits: of a weight in the blocks' matrices: 32, 16, `NF4_BITS`, or `packed_bits`. All other weights are float32.
    """

    rank: int
    targets: Collection[str]
    bits: float = 32

    @property
    def is_quantized(self) -> bool:
        return self.bits < 16


def estimate_adapted(
    model: ModelConfig, layout: ParallelConfig, optimizer: OptimizerConfig, step: StepSizes, base: FrozenBase, packed: bool = False
) -> MemoryEstimate:
    """`estimate_memory` of a run that trains adapters. The dequantized weight of one product counts as gathered.

    Args:
        model: a dense decoder.
        layout: dp, fsdp, ZeRO, tp with or without sequence parallelism, recomputed blocks.
    """
    require_formula(model)
    if model.experts is not None or layout.pipeline_parallel > 1 or layout.context_parallel > 1:
        raise ValueError("There is no formula for adapters over experts, pipelines or context parallelism: measure them.")
    if layout.activation_checkpointing == "selective":
        raise ValueError("There is no formula for adapters with selective recomputation: measure them.")
    own, fsdp = model_of_rank(model, layout), layout.fully_sharded
    counts = parameter_counts(own)
    trained = own.num_hidden_layers * adapter_size(own, base)
    others = sum(counts.values()) - counts["matrix"]
    state = 4 if optimizer.name in ("lion", "muon", "sgd") else 8
    held = bytes_held(trained, data_shards(layout), 3 if fsdp > 1 else layout.zero, state=state)
    weights = held["weights"] + (counts["matrix"] * base.bits / 8 + 4 * others) / fsdp
    width, gathered = WIDTH[step.precision], dequantized_bytes(own, step) if base.is_quantized else 0
    if fsdp > 1:
        block = block_counts(own, 0)
        matrix = base.bits / 8 if base.bits < 32 else width
        of_block = block["matrix"] * matrix + width * (sum(block.values()) - block["matrix"] + adapter_size(own, base))
        root = 4 * (counts["embedding"] + own.hidden_size * (2 if own.norm == "layer_norm" else 1))
        gathered += root + min(1 + layout.prefetch, own.num_hidden_layers) * of_block
    gradients = held["gradients"]
    if layout.zero == 1 and step.microbatches == 1:
        gradients /= data_shards(layout)  # a gradient is freed as soon as its bucket is under way
    return MemoryEstimate(weights, gathered, gradients, held["optimizer state"], adapted_activations(own, layout, step, base, packed))


def sizes_of(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of a block's linear layers by name, of the model or of a rank's part of it."""
    size, width = model.hidden_size, model.intermediate_size
    inner, shared = heads(model)
    sizes = {"q_proj": (inner, size), "k_proj": (shared, size), "v_proj": (shared, size), "o_proj": (size, inner)}
    sizes |= {"up_proj": (width, size), "down_proj": (size, width)}
    return sizes | ({"gate_proj": (width, size)} if model.gated else {})


def adapter_size(own: ModelConfig, base: FrozenBase) -> int:
    """Numbers of a rank's adapters in one block. The factor on the side of a weight's cut is cut with it, and the other one is whole: r for
    each row and each column that the rank's part of the weight has."""
    return sum(base.rank * sum(size) for name, size in sizes_of(own).items() if name in base.targets)


def dequantized_bytes(own: ModelConfig, step: StepSizes) -> float:
    """The largest weight dequantized for its product, of which `AT_ONCE` numbers at a time are float32 before they are rounded."""
    largest = max(a * b for a, b in sizes_of(own).values())
    return largest * WIDTH[step.precision] + 4 * min(largest, AT_ONCE)


def adapted_activations(own: ModelConfig, layout: ParallelConfig, step: StepSizes, base: FrozenBase, packed: bool = False) -> float:
    """What a micro-batch keeps for the backward pass at most. own: what the rank computes. Where none of q, k and v has an update, the
    first block keeps less than is counted here: nothing before the first update."""
    tokens, width = step.rows * step.seq, WIDTH[step.precision]
    slices = layout.tensor_parallel if layout.sequence_parallel else 1
    size, (inner, shared), mask = own.hidden_size, heads(own), step.seq if packed else 0
    kinds = dict(saved_per_token(own, mask, slices))
    if not {"q_proj", "k_proj", "v_proj"} & set(base.targets):
        kinds["products"] -= size
    if not {"gate_proj", "up_proj"} & set(base.targets):
        kinds["products"] -= size
    if "down_proj" not in base.targets:
        kinds["products"] -= own.intermediate_size
    kinds["products"] += base.rank * len(set(base.targets) & set(sizes_of(own)))
    positions = tokens if packed else step.seq
    block = tokens * token_bytes(kinds, width) + (16 * positions * own.head_dim if own.position == "rope" else 0)
    rounds, of_input = width < 4 and layout.fully_sharded == 1, 0
    if rounds:
        block += width * (adapter_size(own, base) + (block_counts(own, 0)["matrix"] if base.bits == 32 else 0))
        of_input = width * size * (inner + 2 * shared) if base.bits == 32 else 0
    entering = 4 * tokens * size / slices
    ends = 2 * entering  # the last norm's input, and the gradients that the sliced loss has computed
    layers = own.num_hidden_layers
    if layout.activation_checkpointing == "full":
        return layers * entering + max(ends, block - entering)
    # The first block's input needs no gradient, so its norm and its frozen q, k and v keep nothing for one.
    first = entering + (8 * tokens / slices if own.norm == "layer_norm" else 0) + of_input
    return layers * block - first + ends
