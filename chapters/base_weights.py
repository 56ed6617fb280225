"""A small base model, trained for a moment in one process: what the run scripts of chapters 10 and 11 begin with."""

from typing import Any

from chapters.rank_run import RankRunConfig


def base_weights(config: RankRunConfig, steps: int, text: bytes, what: str) -> dict[str, Any]:
    """The weights of `config.model` after some steps of next-token prediction on a text.

    Args:
        what: the text's name, for the line that is printed.

    Raises:
        CourseError: fewer steps than one.
    """
    import torch

    from shared.batches import random_batches
    from shared.course.errors import CourseError
    from shared.loop import train
    from shared.loss import next_token_objective
    from shared.model.transformer import TransformerModel
    from shared.optim.build import build_optimizer
    from shared.optim.updater import Update

    if steps < 1:
        raise CourseError(f"base_steps is {steps}: give at least 1.")
    torch.set_num_threads(1)
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    model = TransformerModel(config.model, seed=config.seed)
    batches = random_batches(stream, config.batch_size, config.seq, torch.Generator().manual_seed(config.seed))
    run = train(model, build_optimizer(model, config.optimizer), ([batch] for batch in batches), next_token_objective,
                steps=steps, updater=Update(config.max_norm))  # fmt: skip
    losses = [totals.mean_loss for _, totals in run]
    print(f"Base: {steps} steps on {what}, {losses[0]:.2f} -> {losses[-1]:.2f} nats per byte.")
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
