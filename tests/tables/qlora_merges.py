"""Three models that a merge of QLoRA's adapters can mean, and how far each is from what was trained.

python tests/tables/qlora_merges.py         the table of chapter 10's page
"""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

import torch  # noqa: E402
from frozen_runs import SMALL  # noqa: E402
from torch import Tensor  # noqa: E402

from shared.finetune.adapters import attach_adapter, merge_adapter  # noqa: E402
from shared.finetune.base import merged_weights  # noqa: E402
from shared.finetune.config import AdapterConfig  # noqa: E402
from shared.finetune.quantization.nf4_linear import quantize_base  # noqa: E402
from shared.loss import next_token_objective  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402

CONFIG = AdapterConfig(rank=8, targets=("all-linear",), base="nf4")


def text(rows: int, period: int, seed: int) -> dict[str, Tensor]:
    """Rows that repeat a random word of `period` tokens: something that can be learned from few of them."""
    words = torch.randint(31, (rows, period), generator=torch.Generator().manual_seed(seed))
    ids = words.repeat(1, 40 // period)
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:].contiguous()}


def train(model: TransformerModel, period: int, steps: int, lr: float) -> TransformerModel:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        totals = next_token_objective(model, text(16, period, seed=step))
        (totals.loss_sum / totals.token_count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained() -> tuple[TransformerModel, TransformerModel]:
    """A base, trained on words of 4 tokens, and QLoRA over it, trained on words of 5."""
    base = train(TransformerModel(SMALL), 4, 150, 2e-3)
    model = copy.deepcopy(base)
    quantize_base(model)
    return base, train(attach_adapter(model, CONFIG), 5, 80, 2e-3)


def merges(base: TransformerModel, model: TransformerModel) -> dict[str, TransformerModel]:
    """Onto the dequantized base; onto the base that was quantized; and the first one, quantized again."""
    weights = merged_weights(model)
    onto_dequantized = copy.deepcopy(base)
    onto_dequantized.load_state_dict({name: weights.collect(name) for name in weights.like})
    onto_base = attach_adapter(copy.deepcopy(base), CONFIG)
    values = {name: parameter.data for name, parameter in model.named_parameters() if ".adapters." in name}
    onto_base.load_state_dict(values, strict=False)
    merge_adapter(onto_base)
    again = copy.deepcopy(onto_dequantized)
    quantize_base(again)
    return {"onto the dequantized base": onto_dequantized, "onto the float base": onto_base, "quantized again": again}


@torch.no_grad()
def distances() -> dict[str, tuple[float, float]]:
    """Of each model the relative distance of its logits from those of the adapters over four bits, and its loss by token."""
    with torch.enable_grad():
        base, model = trained()
    batch = text(64, 5, seed=10_000)
    logits, found = model(batch["input_ids"]), {}
    for name, each in {"adapters over NF4": model, **merges(base, model), "the float base": base}.items():
        totals = next_token_objective(each, batch)
        far = (each(batch["input_ids"]) - logits).norm() / logits.norm()
        found[name] = float(far), float(totals.loss_sum / totals.token_count)
    return found


def table() -> Iterator[str]:
    yield "| model | distance of logits | loss a token |"
    yield "|---|---|---|"
    for name, (far, loss) in distances().items():
        yield f"| {name} | {far:.1e} | {loss:.3f} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(*table(), sep="\n")
