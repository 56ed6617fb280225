"""Chapter 12. The dataloaders of a run: this rank's share of the training rows, and held-out text for evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shared.course.errors import CourseError
from shared.data.fim import FillInMiddle
from shared.data.loader import EvaluationLoader, StatefulLoader, require_full_step
from shared.data.mixture import training_loader
from shared.data.prepare import PreparedText
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed, ranks_that_share, require_agreement
from shared.parallel.mesh import Mesh
from shared.trainer.config import TrainerConfig
from shared.trainer.modes import FIM_SLACK

Prepared = TypeVar("Prepared")  # has `folder`, the stores `training` and `held_out`, and a `tokenizer`


def loaders(config: TrainerConfig, text: PreparedText, mesh: Mesh) -> tuple[StatefulLoader, EvaluationLoader]:
    """This rank's share of what is trained on, with middles moved, and of what is held out, as it is."""
    data, transform = config.data, None
    if data.fim.rate > 0:
        if data.fim.split != "token" and text.tokenizer.adds_space:
            raise CourseError("The tokenizer adds a space to each piece of text, so to each moved middle: set data.fim.split to token.")
        transform = FillInMiddle(data.fim, text.tokenizer.encode, text.tokenizer.decode, text.tokenizer.fim_tokens)
    training = training_loader(
        text.training,
        data.prepare.sources,
        text.documents,
        seq=data.seq,
        batch_size=data.batch_size,
        micro_batch_size=data.micro_batch_size,
        seed=config.seed,
        rank=mesh.data.rank,
        ranks=mesh.data.size,
        epochs=data.epochs,
        transform=transform,
        slack=FIM_SLACK if transform else 0,
        strategy=data.strategy,
    )
    require_rows(training, config)
    return training, evaluation_loader(config, text, data.held_out_rows, mesh)


def prepared_once(world: Communicator, folder: Path, make: Callable[[], Prepared], reopen: Callable[[Path], Prepared]) -> Prepared:
    """Data prepared by one rank of those that share a folder, opened by the others, and then compared over all ranks.

    Args:
        folder: of all preparations.
        make, reopen: the two ways to it; `reopen` gets the folder of this preparation.

    Raises:
        CourseError: on every rank: it cannot be prepared or opened on one of them, or machines that share no folder have different data.
    """
    first = ranks_that_share(world, folder)[0]
    text = agreed(world, lambda: make() if world.rank == first else None)
    made = world.gather_objects(text and text.folder.name)[first]
    text = agreed(world, lambda: text or reopen(folder / made))
    stores = {"training": text.training, "held_out": text.held_out}
    sizes = {side: {"documents": len(each), "tokens": each.token_count, "sha256": each.fingerprint[:12]} for side, each in stores.items()}
    require_agreement(world, "text", sizes | {"tokenizer": text.tokenizer.identity[:12], "end_token": text.tokenizer.end})
    return text


def require_rows(loader: StatefulLoader, config: TrainerConfig) -> None:
    """Refuse more steps than the text has rows for. Said only when it has ended, it would come after the training and before the report."""
    require_full_step(loader)
    if config.data.epochs is None:
        return
    rows = config.data.epochs * loader.dataset.rows
    enough = -(-rows // config.data.batch_size)
    if enough < config.steps:
        raise CourseError(
            f"data.epochs is {config.data.epochs}, which gives {rows:,} rows, enough for {enough:,} steps of {config.data.batch_size}, and "
            f"steps is {config.steps:,}: give more text, more epochs, or fewer steps."
        )


def evaluation_loader(config: TrainerConfig, text: PreparedText, rows: int | None, mesh: Mesh | None = None) -> EvaluationLoader:
    """Held-out text: a rank's share of it, or, without a mesh, all of it."""
    rank, ranks = (mesh.data.rank, mesh.data.size) if mesh else (0, 1)
    return EvaluationLoader(text.held_out, seq=config.data.seq, batch_size=config.data.micro_batch_size, limit=rows, rank=rank, ranks=ranks)
