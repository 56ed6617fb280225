"""Check of 07.gradient_sums. Oracle: one process. The core's own model is cut over two and more threads, with the answer as its table, and
each gradient, summed as the table says and put together from its slices, is compared with that of the plain model.

Tolerances. Words are compared exactly; gradients to 1e-9 of their length, in float64: a part that is missing or counted twice is far off.
"""

from unittest.mock import patch

import torch
from torch import Tensor

from shared.course.checking import Case, Check
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.sharding import sharding_of
from shared.model.transformer import TransformerModel
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.tensor import axis

from .ranks import CONTRACT

ONE_PROCESS = "each gradient of the same model in one process"
SIZES = {"vocab_size": 11, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 20}
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
FAMILIES = {
    "llama": {},
    "gpt2": BIASES | {"position": "learned", "norm": "layer_norm", "gated": False, "tie_word_embeddings": True},
    "qwen3": {"qk_norm": True, "num_key_value_heads": 2},
    "bert": BIASES | {"architecture": "encoder", "norm": "layer_norm", "norm_position": "post", "embedding_norm": True, "head": "mlm"}
    | {"position": "learned", "max_position_embeddings": 8},
    "mqa": {"num_key_value_heads": 1, "attention_bias": True},
}  # fmt: skip

BLOCK = "stack.blocks.7"
ATTENTION = [f"{BLOCK}.attention.{name}" for name in ("q_proj.weight", "k_proj.weight", "k_proj.bias", "v_proj.weight", "o_proj.weight")]
HEADS = [f"{BLOCK}.attention.q_norm.weight", f"{BLOCK}.attention.k_norm.weight"]
ROW_BIASES = [f"{BLOCK}.attention.o_proj.bias", f"{BLOCK}.cross_attention.o_proj.bias", f"{BLOCK}.feed_forward.down_proj.bias"]
COLUMNS = [f"{BLOCK}.feed_forward.{name}" for name in ("up_proj.weight", "up_proj.bias", "gate_proj.bias", "down_proj.weight")]
NORMS = [f"{BLOCK}.{name}" for name in ("attention_norm.weight", "cross_attention_norm.weight", "feed_forward_norm.bias")]
FINAL = ["stack.final_norm.weight", "stack.final_norm.bias", "encoder.final_norm.weight"]
ENDS = [f"{name}.weight" for name in ("embedding.tokens", "embedding.positions", "embedding.norm", "stack.relative_bias", "head.linear")]
MLM = ["head.transform.weight", "head.transform.bias", "head.norm.weight", "head.norm.bias"]
BLOCKS = [*NORMS, *ATTENTION, *COLUMNS, *ROW_BIASES]
EVERYTHING = [*ENDS, *NORMS, *ATTENTION, *HEADS, *COLUMNS, *ROW_BIASES, *FINAL, *MLM, "head.linear.bias"]


def of(names, sequence_parallel=False, copied_heads=False):
    return lambda: {"names": list(names), "sequence_parallel": sequence_parallel, "copied_heads": copied_heads}


def tell(*everywhere, copies=()):
    return lambda **_: {"sums": dict.fromkeys(everywhere, "all") | dict.fromkeys(copies, "copies")}


def model_of(family: str) -> TransformerModel:
    model = TransformerModel(ModelConfig(**SIZES | {"initializer_range": 0.2} | FAMILIES[family]), seed=1).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=parameter.dtype)
    return model


def backward(model: TransformerModel) -> None:
    ids = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(2))
    packed_next_token_objective(model, {"input_ids": ids, "targets": ids.roll(-1, 1)}).loss_sum.backward()


def run(function, family: str, ranks: int, sequence_parallel: bool):
    """The parameters whose gradients differ from one process's."""
    plain = model_of(family)
    backward(plain)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def work(world):
        model = model_of(family)
        axis.TensorParallel().shape(model, Mesh(ParallelConfig(tensor_parallel=ranks, sequence_parallel=sequence_parallel), world))
        backward(model)
        return [name for name, parameter in model.named_parameters() if differs(whole_gradient(parameter), expected[name])]

    with patch.object(axis, "gradient_sums", function):
        wrong = run_threads(work, ranks)
    return {"gradients that differ from one process": sorted(set().union(*wrong))}


def whole_gradient(parameter: Tensor) -> Tensor:
    gradient, over, sharding = parameter.grad.clone(), getattr(parameter, "partial_over", None), sharding_of(parameter)
    if over is not None:
        over.all_reduce(gradient)
    return gradient if sharding is None else sharding.gather(gradient, everyone=True)


def differs(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() > 1e-9 * expected.norm() + 1e-12)


def none_differ(**_):
    return {"gradients that differ from one process": []}


def trained(family: str, ranks: int, sequence_parallel: bool):
    how = "with sequence parallelism" if sequence_parallel else "without sequence parallelism"
    arguments = {"family": family, "ranks": ranks, "sequence_parallel": sequence_parallel}
    return Case("two ranks", f"{family} on {ranks} ranks, {how}", lambda: dict(arguments), none_differ, ONE_PROCESS, run)


def case(rung, title, given, expected):
    return Case(rung, title, given, expected, CONTRACT)


CHECK = Check(
    exercise="07.gradient_sums",
    outputs=("sums",),
    spoilt=("sums",),
    cases=[
        case("shape and dtype", "the norms of queries and keys, and one of the stream", of([*HEADS, *NORMS]), tell(*HEADS)),
        case("worked example", "a block", of(BLOCKS), tell()),
        case("worked example", "a block with sequence parallelism", of(BLOCKS, True), tell(*NORMS, *ROW_BIASES)),
        case("worked example", "norms of queries and keys with sequence parallelism", of(HEADS, True), tell(*HEADS)),
        case("worked example", "BERT's head", of([*MLM, "head.linear.weight", "head.linear.bias"]), tell(*MLM)),
        case("worked example", "BERT's head with sequence parallelism", of([*MLM, "head.linear.bias"], True), tell(*MLM)),
        case("worked example", "copied heads", of(ATTENTION, False, True), tell(copies=ATTENTION[1:4])),
        case("worked example", "both ends", of([*ENDS, *FINAL]), tell()),
        case("worked example", "both ends with sequence parallelism", of([*ENDS, *FINAL], True), tell(*FINAL)),
        case("property", "no names", of([], True, True), tell()),
        case("property", "everything, with nothing cut but matrices", of(EVERYTHING), tell(*HEADS, *MLM)),
        case("property", "everything, with copied heads", of(EVERYTHING, False, True), tell(*HEADS, *MLM, copies=ATTENTION[1:4])),
        case(
            "property", "everything, with both", of(EVERYTHING[::-1], True, True),
            tell(*NORMS, *HEADS, *ROW_BIASES, *FINAL, *MLM, copies=ATTENTION[1:4]),
        ),
        case(
            "property", "cross-attention, whose heads are copied too",
            of([f"{BLOCK}.cross_attention.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "k_norm")], True, True),
            tell(f"{BLOCK}.cross_attention.k_norm.weight",
                 copies=[f"{BLOCK}.cross_attention.k_proj.weight", f"{BLOCK}.cross_attention.v_proj.weight"]),
        ),
        trained("llama", 2, True),
        trained("gpt2", 2, True),
        trained("gpt2", 2, False),
        trained("qwen3", 4, True),
        trained("bert", 2, False),
        trained("bert", 2, True),
        trained("mqa", 4, False),
    ],
)  # fmt: skip
