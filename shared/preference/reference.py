"""Chapter 11. Reference log-probabilities: computed with each batch, by a frozen model or with LoRA off, or once and cached by document.

DPO compares the policy with a model that does not change. What that model says of a batch is therefore data, and stands in the batch as
`reference`: objectives keep to one model, and every layout of chapters 06 to 09 serves as it is.

    a second model         memory for its weights, a forward pass for each batch       any kind of model and data
    base_model             a forward pass for each batch                               the policy is the reference with an adapter
    cached by document     4 bytes for each token on disk, one pass over the data      the documents are always the same

Left out on purpose: a reference that follows the policy.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from shared.course.errors import CourseError
from shared.data.loader import EvaluationLoader
from shared.data.rows import Documents
from shared.data.shards import TokenStore
from shared.devices import on_device
from shared.finetune.adapters import base_model
from shared.output_files import write_atomically
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.health.agreement import agreed, ranks_that_share
from shared.preference.log_probs import score_answers
from shared.totals import Batch

FORMAT = "course reference 1"
Score = Callable[[Batch], Tensor]  # a batch of packed rows -> the log-probabilities of its targets, [rows, seq]


def scorer(model: nn.Module, score: Callable[[nn.Module, Batch], Tensor] = score_answers, without: nn.Module | None = None) -> Score:
    """A function that computes log-probabilities with a model, on its device.

    Args:
        model: what objectives call: of a strategy, or a plain model.
        score: `score_answers`, or that in the run's precision (`autocast_objective`): policy and reference must be rounded the same way.
        without: a module whose adapters rest meanwhile (`base_model`): the policy's, to have its base as the reference.
    """

    def compute(batch: Batch) -> Tensor:
        batch = on_device(batch, next(model.parameters()).device)
        if without is None:
            return score(model, batch)
        with base_model(without):
            return score(model, batch)

    return compute


class ReferencedLoader:
    """Another loader's batches with their `reference`: [rows, seq] float, what the reference says of their targets.

    Args:
        loader: yields steps, which are lists of micro-batches, or batches.
        score: of the reference. Ranks call it equally often, since their loaders yield equally many micro-batches.
    """

    def __init__(self, loader: Iterable, score: Score):
        self.loader, self.score = loader, score

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator:
        for step in self.loader:
            yield [self.referenced(batch) for batch in step] if isinstance(step, list) else self.referenced(step)

    def referenced(self, batch: Batch) -> Batch:
        return batch | {"reference": self.score(batch)}


class ReferencedDocuments(Documents):
    """The documents of a store with their reference log-probabilities, which rows have as a column (`reference`)."""

    def __init__(self, store: TokenStore, log_probs: np.ndarray, identity: str):
        super().__init__(store)
        self.log_probs, self.values, self.fingerprint = log_probs, store.values, f"{store.fingerprint}+{identity}"
        self.offsets = np.concatenate([[0], np.cumsum(store.lengths)])

    def reference(self, number: int) -> np.ndarray:
        """[tokens] float32: the log-probability of each token of a document after those before it; 0 where it is not trained."""
        return self.log_probs[self.offsets[number] : self.offsets[number + 1]]


def cached_reference(
    store: TokenStore,
    score: Score,
    identity: str,
    *,
    seq: int,
    batch_size: int,
    world: Communicator | None = None,
    data: Communicator | None = None,
) -> ReferencedDocuments:
    """The documents of a store with reference log-probabilities, cached in a file beside it. Every rank calls it.

    Args:
        store: of prepared pairs or answers.
        score: of the reference.
        identity: a hash of the reference's weights, its configuration and the precision in which it computes; names the file.
        seq: tokens that a row predicts.
        batch_size: rows in a batch of one rank.
        world, data: all ranks, and those that share out the rows; None for a single process.
    """
    world, data = world or SingleRankCommunicator(), data or SingleRankCommunicator()
    if (longest := int(store.lengths.max()) - 1) > seq:
        raise CourseError(f"{store.folder} holds texts of {longest:,} tokens, and a row takes {seq:,}: prepare them for shorter rows.")
    file = store.folder / f"reference-{identity[:12]}-{store.fingerprint[:12]}.safetensors"
    facts = {"format": FORMAT, "model": identity, "store": store.fingerprint}
    values = read_values(file, facts, store.token_count)
    if not all(world.gather_objects(values is not None)):
        values = compute_values(store, score, seq, batch_size, data)
        writes = ranks_that_share(world, store.folder)[0] == world.rank
        agreed(world, lambda: write_values(file, facts, values) if writes else None)
    return ReferencedDocuments(store, values, identity)


def compute_values(store: TokenStore, score: Score, seq: int, batch_size: int, data: Communicator) -> np.ndarray:
    """[tokens] float32 of all documents, on every rank. Each data rank scores its share of the rows."""
    loader = EvaluationLoader(store, seq=seq, batch_size=batch_size, rank=data.rank, ranks=data.size)
    offsets, values = np.concatenate([[0], np.cumsum(store.lengths)]), torch.zeros(store.token_count)
    for number, batch in enumerate(loader):
        scores = score(batch).float().cpu()
        for row, found in zip(loader.rows[number * batch_size :], scores, strict=False):
            place = 0
            for segment in () if row is None else loader.plan.segments(row):
                first, count = offsets[segment.document] + segment.start + 1, segment.stop - segment.start - 1
                values[first : first + count] = found[place : place + count]
                place += count
    if data.size > 1:
        home = scores.device
        values = values.to(home)
        data.all_reduce(values)
    return values.cpu().numpy()


def write_values(file: Path, facts: dict[str, str], values: np.ndarray) -> None:
    content = torch.from_numpy(values)
    write_atomically(file, save({"log_probs": content}, facts | {"sha256": hashlib.sha256(values).hexdigest()}))


def read_values(file: Path, facts: dict[str, str], count: int) -> np.ndarray | None:
    """The cached values; None if the file is missing, damaged or of another model, so that they are computed again."""
    with suppress(OSError, SafetensorError), safe_open(file, "numpy") as content:
        metadata, values = content.metadata() or {}, content.get_tensor("log_probs")
        sound = values.dtype == np.float32 and values.shape == (count,) and metadata.get("sha256") == hashlib.sha256(values).hexdigest()
        return values if sound and facts.items() <= metadata.items() else None
    return None
