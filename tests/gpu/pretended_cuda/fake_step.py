"""The peak memory of a training step on a card that is not there, at full size: fake tensors, which have shapes and no numbers.

    python tests/gpu/pretended_cuda/fake_step.py RESULT.json CASE.json

CASE.json is a list of cases, each {"file": configuration, "words": [overrides], "layers": a number or null}. "layers" takes the place of
the model's own number, which words may not change where the model is that of `start_from`. RESULT.json gets for each the bytes of the
second step's peak, those that the planner foresees, and how many operators ran and how many bytes these read and wrote. Rank 0 steps,
with the trainer's own functions, in its layout; its process groups carry nothing (`chapters.dry_run`). Storages are counted, rounded to
512 bytes as the caching allocator does. Not counted: the allocator's gaps, CUDA's context, buffers of cuBLAS and NCCL. Attention is what
PyTorch chooses on an RTX 3090: its flash kernel without a mask, the memory-efficient one with a mask.
"""

import json
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS.parent)]

from pretended_cuda import backend  # noqa: E402

backend.start()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from chapters.dry_run import FakeGroup, Recorder  # noqa: E402
from shared.devices import on_device  # noqa: E402
from shared.finetune.answer_objective import answer_objective  # noqa: E402
from shared.finetune.quantization.nf4 import dynamic_values, values_on  # noqa: E402
from shared.loop import accumulate_gradients  # noqa: E402
from shared.model import document_attention, transformer  # noqa: E402
from shared.model.chunked_loss import packed_next_token_objective  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.moe.builders import MIXTURE  # noqa: E402
from shared.optim.build import build_optimizer  # noqa: E402
from shared.optim.precision import autocast_objective  # noqa: E402
from shared.parallel import held, parallelize  # noqa: E402
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator  # noqa: E402
from shared.parallel.comm.trace import CommTrace  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.pipeline.runner import PipelineRunner  # noqa: E402
from shared.trainer.config import TrainerConfig  # noqa: E402
from shared.trainer.models import RUN_AXES, with_adapter  # noqa: E402
from shared.trainer.planner.memory import run_memory, step_sizes  # noqa: E402
from shared.trainer.planner.opening import open_planned  # noqa: E402

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
QUIET = ("detach", "alias", "view", "_unsafe_view", "empty", "t", "empty_strided")


def attention_of_sm86(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What ATen dispatches to in 16 bits; the choice itself is CUDA code."""
    if enable_gqa:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    if attn_mask is None and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:  # made in each call: convert_boolean_attn_mask in sdp_utils
        bias = torch.zeros(bias.shape, dtype=q.dtype, device=q.device).masked_fill_(~bias, -torch.inf)
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]


class Count(TorchDispatchMode):
    """Counts within `with`. live, peak: bytes of storages on the card. kernels: operators. moved: bytes that these read and wrote."""

    counting: "Count | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = self.kernels = self.moved = 0
        self.what: dict[int, str] = {}
        self.at_peak: dict[int, tuple[int, str]] = {}

    def __enter__(self) -> "Count":
        Count.counting = self
        return super().__enter__()

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = operator._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":  # numbers that fake tensors do not have: a step's count, a norm
            return 1.0
        if name == "_pin_memory":
            return args[0]
        if name == "nonzero":  # of targets: all of them count
            return torch.zeros(args[0].numel(), args[0].dim(), dtype=torch.int64, device=args[0].device)
        result = operator(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_cuda]
        for tensor in made:
            self.see(tensor.untyped_storage(), f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
        if made and not operator.is_view and name not in QUIET:
            read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.is_cuda]
            self.kernels += 1
            self.moved += sum(each.nbytes for each in (*made, *read))
        return result

    def see(self, storage: torch.UntypedStorage, what: str = "", size: int | None = None) -> None:
        key, size = storage._cdata, storage.nbytes() if size is None else size
        if key not in self.sizes:
            weakref.finalize(storage, self.drop, key)
        rounded = -(-size // 512) * 512
        self.live += rounded - self.sizes.get(key, 0)
        self.sizes[key] = rounded
        self.what[key] = what
        if self.live > self.peak:
            self.peak = self.live

    def drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)


def resize_counted(storage: torch.UntypedStorage, size: int, resize: Any = torch.UntypedStorage.resize_) -> torch.UntypedStorage:
    """No operator: fsdp frees and takes the memory of gathered weights by it."""
    resize(storage, size)
    if Count.counting is not None and storage._cdata in Count.counting.sizes:
        Count.counting.see(storage, "resize", size)
    return storage


class Ranks(FakeGroup):
    """A fake process group in which sends and receives carry nothing either."""

    def dispatch(self, operation: str, payload: Any, start: Any, *words: Any, peer: int | None = None, **options: Any) -> Any:
        return super().dispatch(operation, payload, start, *words, **options)

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Communicator:
        return Ranks(mine, axis, self.trace, self.recorder, self.splits)


def one_document_each(ids: Tensor, device: torch.device) -> document_attention.PackedDocuments:
    rows, seq = ids.shape
    return document_attention.PackedDocuments([seq] * rows, rows, torch.zeros(rows + 1, dtype=torch.int32, device=device), seq)


def without_numbers() -> None:
    """Leave out what needs numbers: initial weights, and what ranks compare."""
    torch.UntypedStorage.resize_ = resize_counted
    F.scaled_dot_product_attention = attention_of_sm86
    transformer.initialize = lambda model, seed: None
    values_on(DEVICE), values_on(DEVICE, dynamic_values)  # kept from now on
    document_attention.pack_of = one_document_each
    held.Holders.require_complete = lambda self: None
    parallelize.fingerprints = lambda model: {}
    PipelineRunner.share_totals = lambda self, totals: totals  # the last stage's, which is not there


def step_of(config: TrainerConfig) -> dict[str, Any]:
    """Two steps of rank 0; figures of the second."""
    layout = config.parallel
    ranks = layout.data_ranks * layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
    world = Ranks(range(ranks), "world", CommTrace(), Recorder(time.perf_counter)) if ranks > 1 else SingleRankCommunicator()
    objective = answer_objective if config.mode == "sft" else packed_next_token_objective
    sizes, mesh = step_sizes(config), Mesh(layout, world)
    with FakeTensorMode(allow_non_fake_inputs=True), Count() as count:
        with DEVICE:
            model = with_adapter(TransformerModel(config.model, MIXTURE), config.adapter, config.seed)
        strategy = parallelize.apply_parallel(
            model, mesh, config.optimizer, getattr(torch, config.precision), DEVICE, 0, RUN_AXES
        )
        optimizer = build_optimizer(strategy.optim_params, config.optimizer, strategy.routes)
        objective = strategy.objective(autocast_objective(objective, config.precision))
        runner = strategy.runner(accumulate_gradients)
        for _ in range(2):
            count.peak, count.kernels, count.moved = count.live, 0, 0
            ids = torch.zeros(sizes.rows, sizes.seq, dtype=torch.int64)
            batch = {name: ids.clone() for name in ("input_ids", "targets", "documents", "positions")}
            microbatches = [on_device(batch, DEVICE) for _ in range(min(sizes.microbatches, 2 * layout.pipeline_parallel))]
            optimizer.zero_grad(set_to_none=True)
            runner(strategy.model, microbatches, objective)
            for engine in strategy.engines:
                engine.finish()
            optimizer.step()
        peak = count.peak
    return {"peak": peak, "kernels": count.kernels, "moved": count.moved}


def main() -> None:
    result, cases = (Path(word) for word in sys.argv[1:])
    without_numbers()
    told = []
    for case in json.loads(cases.read_text(encoding="utf-8")):
        config = open_planned(Path(case["file"]), case["words"])
        if case["layers"]:
            config = replace(config, model=replace(config.model, num_hidden_layers=case["layers"], layer_types=None))
        foreseen = run_memory(config)[0]
        told.append(step_of(config) | {"foreseen": foreseen.training} | vars(foreseen))
        result.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
