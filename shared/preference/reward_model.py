"""Chapter 11. Reward model: a decoder with a scalar head, trained on pairs to give the preferred answer the higher reward.

A language model's head is replaced by one vector, and the reward of a text is that vector's product with the hidden state of the text's
last token, which alone has read all of it (Stiennon et al. 2020, section 3.4; Ouyang et al. 2022, section 3.5). The numbers equal
transformers' sequence classification with one label, and so do the files: the decoder under its usual names, no language-model head, and
one vector, `score.weight` [1, D].

Rows are packed, and the reward is read where a text's last token is the input: rows for reward models end with that token, where rows of
other objectives have it as a target only.

Left out on purpose: encoders as reward models, several labels, rewards of single steps.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shared.course.bounds import NonNegativeFloat, checked
from shared.course.errors import SettingError
from shared.loss import IGNORED
from shared.model.builders import Builders
from shared.model.chunked_loss import apart
from shared.model.config import ModelConfig
from shared.model.hf.files import TensorFolder
from shared.model.hf.format import ConfigJson, FileTensor, Format, same
from shared.model.hf.pretrained import open_pretrained
from shared.model.init import forget_files, initial_value, materialize, stream_seed
from shared.model.transformer import PLAIN, TransformerModel
from shared.preference.bradley_terry import bradley_terry_loss
from shared.preference.log_probs import token_shares
from shared.preference.value_head import ScalarProjection
from shared.sampling import evaluating
from shared.totals import Batch, Totals

HEAD, SCORE = "head.weight", "score.weight"  # the vector's logical name, and its name in the files
WIDTH = 16  # sequences are padded to multiples of this, which sequence-parallel ranks can share out


@dataclass(frozen=True)
@checked
class RewardConfig:
    """The loss of a reward model.

    Args:
        centering: how much it costs when the two rewards of a pair do not add up to 0; Eisenstein et al. (2023) take 0.01.
        margin_scale: multiplies the margins that the data give; 0 leaves them out.
    """

    centering: NonNegativeFloat = 0.0
    margin_scale: NonNegativeFloat = 1.0


class ScalarHead(ScalarProjection):
    """The head of a reward model: hidden states [..., D] -> a reward at each position [...], in float32 at least.

    Under tensor parallelism every rank computes all of it, from the whole hidden states.
    """

    knows_tensor_parallelism = needs_course_backend = True

    def whole_logits(self, rewards: Tensor) -> Tensor:
        """A reward at each position: the model's output by default."""
        return rewards


def as_reward_model(model: TransformerModel, seed: int = 0) -> TransformerModel:
    """Replace the head of a decoder by a scalar one, in place. The new head's weight depends on the seed alone, and is trained.

    Args:
        model: whole and plain, also on the meta device, before `apply_parallel`. With adapters: after `attach_adapter`, which freezes what
            is there.
        seed: of the head's weight.

    Returns:
        The model. Its configuration ties nothing any more, and its files have the format of transformers' sequence classification.
    """
    if model.config.architecture != "decoder":
        raise SettingError(f"A reward model is a decoder, and model.architecture is {model.config.architecture}: start from a decoder.")
    model.config = replace(model.config, tie_word_embeddings=False)
    like = model.embedding.tokens.weight
    model.head = ScalarHead(model.config.hidden_size, dtype=like.dtype, device=like.device)
    weight = model.head.weight
    weight.initializer = partial(drawn, seed, model.config.initializer_range)
    if not weight.is_meta:
        weight.data.copy_(initial_value(HEAD, weight, model.config, seed))
    model.stored_as, model.trained_whole = sequence_classification, {HEAD: SCORE}
    return model


def drawn(seed: int, deviation: float, shape: Sequence[int], of_model: Generator) -> Tensor:
    """The initial weight of a head, from a separate seed instead of the model's generator."""
    return torch.randn(shape, generator=Generator().manual_seed(stream_seed(HEAD, seed))) * deviation


def open_reward_model(
    folder: Path | str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    builders: Builders = PLAIN,
) -> TransformerModel:
    """The reward model in a folder of transformers' sequence classification, on the meta device, as `open_pretrained` returns models. The
    folder of a language model gives a new head, with a warning.

    Args:
        seed: of a new head's weight.
        dtype, builders: as for `open_pretrained`.
    """
    change, files = partial(as_reward_model, seed=seed), TensorFolder(Path(folder))
    if SCORE in files.shapes:
        return open_pretrained(folder, dtype=dtype, builders=builders, files=files, change=change)
    warnings.warn(f"{folder} holds a language model (no {SCORE}): its reward head is new, and its rewards mean nothing yet.", stacklevel=2)
    with torch.device("meta"):
        return change(open_pretrained(folder, dtype=dtype, builders=builders, files=files))


def load_reward_model(folder: Path | str, *, device: torch.device | str = "cpu", **options: Any) -> TransformerModel:
    """`open_reward_model` with its weights, on a device. It is in training mode, as every new module is."""
    model = open_reward_model(folder, **options)
    materialize(model, device, seed=0)
    forget_files(model)
    return model


@dataclass(frozen=True)
class RewardObjective:
    """The Bradley-Terry loss of packed pairs. Called as objective(model, batch); one model call, no device synchronization.

    The batch: `input_ids`, `documents` and `positions` [rows, seq] int64, in which sequence 2p of a row is the chosen and 2p + 1 the
    rejected answer of its pair p, each with its prompt and its last token. `margins` [rows, seq], where it has them: column p of a row
    belongs to pair p.

    Its `Totals` count pairs. Metrics: `accuracy` (the chosen answer has the higher reward), `chosen_reward`, `rejected_reward` and their
    difference, `margin`.
    """

    config: RewardConfig = RewardConfig()

    def __call__(self, model: nn.Module, batch: Batch) -> Totals:
        margins = batch.get("margins") if self.config.margin_scale else None
        return on_pairs(model, batch, partial(self.totals, margins=margins))

    def totals(self, chosen: Tensor, rejected: Tensor, real: Tensor, margins: Tensor | None) -> Totals:
        if margins is not None:
            margins = self.config.margin_scale * margins[:, : real.shape[1]].to(chosen.dtype).masked_fill(~real, 0)
        loss = bradley_terry_loss(chosen, rejected, margins, self.config.centering).masked_fill(~real, 0)
        chosen, rejected = chosen.detach(), rejected.detach()
        sums = {"accuracy": chosen > rejected, "chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
        return Totals(loss.sum(), real.sum(), {name: value.sum() for name, value in sums.items()})


def on_pairs(model: nn.Module, batch: Batch, of_rewards: Callable[[Tensor, Tensor, Tensor], Totals]) -> Totals:
    """Call a reward model on packed pairs, and a function on what they are rewarded with: of_rewards(chosen, rejected, real), all [rows,
    pairs], the last one bool. Both rewards are 0 where a row has no such pair (`real` is False)."""

    def head_fn(head: nn.Module, hidden_states: Tensor) -> Totals:
        last = last_positions(batch["documents"], 2 * -(-hidden_states.shape[1] // 2))
        real = last[:, 1::2] >= 0
        rewards = sequence_rewards(head, hidden_states, last)
        return of_rewards(*(rewards[:, first::2].masked_fill(~real, 0) for first in (0, 1)), real)

    read = batch["documents"].masked_fill(batch["documents"] < 0, IGNORED)  # every token of a pair counts, and there are no targets
    return model(batch["input_ids"], head_fn=head_fn, valid=token_shares(read, batch["documents"], 2), **apart(batch))


def last_positions(documents: Tensor, count: int) -> Tensor:
    """Where each sequence of packed rows ends: [rows, seq] -> [rows, count] int64, -1 for a sequence that a row has not.

    Args:
        documents: which sequence a position belongs to, numbers below `count`; -1 for padding.
    """
    positions = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    ends = documents.new_full((len(documents), count), -1)
    return ends.scatter_reduce(1, documents.clamp(min=0), positions.where(documents >= 0, -1), "amax")


def sequence_rewards(head: nn.Module, hidden_states: Tensor, last: Tensor) -> Tensor:
    """The reward of each sequence: [rows, seq, D] and the positions of last tokens [rows, count] -> [rows, count]; for a position of -1,
    some number."""
    return head(hidden_states).gather(1, last.clamp(min=0))


def score(model: nn.Module, sequences: Sequence[Sequence[int]], batch_size: int = 16) -> list[float]:
    """The rewards of some texts, without gradients and without dropout.

    Args:
        model: a reward model in any layout (`ParallelStrategy.model`). Where its ranks work together on a forward pass (tensor, pipeline,
            expert parallelism, FSDP), all of them call this with as many sequences.
        sequences: token ids: prompt and answer, with the end token of a finished one.
        batch_size: sequences in a forward pass. Sequences of like lengths are scored together, so little is padded.

    Returns:
        A reward for each sequence, in their order.
    """
    if empty := [number for number, ids in enumerate(sequences) if not len(ids)]:
        raise ValueError(f"Sequence {empty[0]} has no tokens, so there is none to read a reward at: give prompt and answer.")
    config = next(module for module in model.modules() if isinstance(module, TransformerModel)).config
    device = next(model.parameters()).device
    order = sorted(range(len(sequences)), key=lambda number: len(sequences[number]))
    found = [0.0] * len(sequences)
    with torch.no_grad(), evaluating(model):
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            ids, last = padded([sequences[number] for number in numbers], config.max_position_embeddings)
            rewards = model(ids.to(device), head_fn=partial(sequence_rewards, last=last.to(device)))
            for number, reward in zip(numbers, rewards.squeeze(1).tolist(), strict=True):
                found[number] = reward
    return found


def padded(sequences: Sequence[Sequence[int]], longest: int) -> tuple[Tensor, Tensor]:
    """Sequences as rows [rows, seq], padded on the right, where a causal model's earlier positions do not see it; and the position of each
    last token, [rows, 1]. longest: what a model takes, to which padding alone may lead, and never beyond."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    rows = pad_sequence([torch.as_tensor(ids, dtype=torch.int64) for ids in sequences], batch_first=True)
    width = min(-(-rows.shape[1] // WIDTH) * WIDTH, longest)
    return F.pad(rows, (0, max(0, width - rows.shape[1]))), lengths.unsqueeze(1) - 1


def sequence_classification(known: Format, raw: ConfigJson) -> tuple[Format, ConfigJson]:
    """The format and config.json of a language model -> those of its reward model, an AutoModelForSequenceClassification.

    Files of OLMoE and dots.llm1 are written in the same way; transformers 5 has no class that reads them.
    """
    architecture = known.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "ForSequenceClassification"

    def with_score(tensors: Callable[[ModelConfig], list[FileTensor]]) -> Callable[[ModelConfig], list[FileTensor]]:
        return lambda config: [*(each for each in tensors(config) if not each.ours[0].startswith("head.")), same(SCORE, HEAD)]

    made = {"tensors": with_score(known.tensors), "stacked": with_score(known.stacked) if known.stacked else None}
    changed = replace(known, architecture=architecture, tied=(), ignored=(*known.ignored, *known.tied), **made)
    return changed, raw | {"architectures": [architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
