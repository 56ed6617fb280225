"""Train a small model with DPO on two ranks and in one process, and show where the two differ.

python chapters/11_preferences/run.py                       a model of code learns which end belongs to a beginning
python chapters/11_preferences/run.py --dpo.loss simpo      also ipo, hinge, robust, orpo
python chapters/11_preferences/run.py --layout tp2          also fsdp2, dp2_zero1, pp2, tp2_sp, fsdp2_tp2, one, ...
python chapters/11_preferences/run.py --impl mine           with your own exercises
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chapters.rank_run import RankRunConfig, require_cuts, run_and_compare
from shared.course.launch import launch
from shared.model.config import ModelConfig
from shared.parallel.config import ParallelConfig
from shared.preference.config import DPOConfig


@dataclass
class PreferenceRunConfig(RankRunConfig):
    """Learn preferences on several ranks and in one process, and compare.

    Args:
        dpo: the loss; every field of DPOConfig. The reference's log-probabilities stand in each row.
        base_steps: training steps of the model before that, in one process, on the same text: its weights are the reference.
    """

    dpo: DPOConfig = field(default_factory=DPOConfig)
    base_steps: int = 150


def run(config: PreferenceRunConfig) -> None:
    from chapters.base_weights import base_weights
    from chapters.text_run import corpus_of
    from shared.course.errors import CourseError
    from shared.parallel.parallelize import AXES
    from shared.parallel.pipeline.axis import PipelineParallel
    from shared.parallel.tensor.axis import TensorParallel
    from shared.preference.objective import PreferenceObjective

    if config.dpo.loss == "kto":
        raise CourseError("Each row of this run is a pair, and kto learns from single answers: choose another dpo.loss, or the trainer.")
    if config.seq % 2 or config.seq < 16:
        raise CourseError(f"seq is {config.seq}, and a row holds two windows: give an even number of at least 16.")
    weights = base_weights(config, config.base_steps, b"".join(each.content for each in corpus_of(config.data).training), "the text")
    rows = partial(PairsOfText, config.model, weights, config.dtype)
    axes = (*AXES, PipelineParallel(), TensorParallel())
    prepare = partial(begin_with, weights)
    run_and_compare(config, PreferenceObjective(config.dpo), axes, require_possible, prepare, rows, "bits per pair")


def require_possible(config: RankRunConfig, layout: ParallelConfig) -> None:
    """Refuse what the ranks would refuse one by one."""
    from shared.parallel.pipeline.axis import require_stages

    if layout.context_parallel > 1:
        raise ValueError("Answers' tokens are added up on one rank, so context parallelism has no preference loss: give another layout.")
    require_cuts(config, layout)
    if layout.pipeline_parallel > 1:
        require_stages(config.model.resolved(), layout)


def begin_with(weights: dict[str, Any], model: Any) -> None:
    """Give a model weights, in place, in the model's own dtype."""
    model.load_state_dict(weights)


class PairsOfText:
    """A dataset of pairs made of a text: its own next bytes are preferred to bytes from another place.

    Args:
        model, weights, dtype: of the reference, whose log-probabilities stand in each row.
        stream: [bytes] uint8.
        seq: positions in a row; each of the two sequences has half of them, a quarter of it prompt.
        seed: of the places.
    """

    def __init__(self, model: ModelConfig, weights: dict[str, Any], dtype: str, stream: Any, seq: int, seed: int):
        import torch

        from chapters.text_windows import TextWindows
        from shared.model.transformer import TransformerModel

        self.windows = TextWindows(stream, seq // 2, seed)
        self.seq, self.settings, self.initial_state = seq, self.windows.settings, self.windows.initial_state
        self.next_indices = self.windows.next_indices
        self.reference = TransformerModel(model).to(getattr(torch, dtype)).eval()
        begin_with(weights, self.reference)

    def row(self, index: int) -> Any:
        """Pair `index`: `input_ids`, `targets`, `documents`, `positions` and `reference`, [seq] each."""
        import torch

        from shared.data.packing import pack_documents
        from shared.data.rows import Row
        from shared.loss import IGNORED
        from shared.preference.log_probs import score_answers

        own, other = (self.tokens(number) for number in (2 * index, 2 * index + 1))
        prompt = len(own) // 4
        row = pack_documents([own, torch.cat([own[:prompt], other[prompt:]])], self.seq)
        row["targets"] = row["targets"].where(row["positions"] >= prompt - 1, IGNORED)
        batch = {name: tensor[None] for name, tensor in row.items()}
        return Row(row | {"reference": score_answers(self.reference, batch)[0]}, 0)

    def tokens(self, number: int) -> Any:
        """Window `number`: [seq / 2 + 1]."""
        import torch

        window = self.windows.row(number).tensors
        return torch.cat([window["input_ids"], window["targets"][-1:]])


if __name__ == "__main__":
    launch(run, PreferenceRunConfig, Path(__file__).with_name("run.yaml"))
