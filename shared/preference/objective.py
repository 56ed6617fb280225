"""Chapter 11. The preference objective: DPO, its relatives and KTO on packed rows, with one call of the model for each micro-batch.

A pair is two sequences of one row, so its two log-probabilities come out of one pass, and the reference's stand in the batch. That makes it
an objective like any other: micro-batches, data ranks and pipelines are none of its business. What is divided by is the number of pairs.
"""

from functools import partial

from torch import Tensor, nn

from shared.loss import IGNORED
from shared.model.chunked_loss import apart
from shared.preference.dpo import dpo_loss
from shared.preference.config import DPOConfig
from shared.preference.log_probs import (
    answer_log_probs,
    sequence_log_probs,
    token_shares,
)
from shared.preference.dpo import (
    hinge_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    robust_dpo_loss,
    simpo_loss,
)
from shared.totals import Batch, Totals


class PreferenceObjective:
    """The loss of a micro-batch of packed rows, summed over its pairs (kto: its answers), and their number.

    `objective(model, batch)` calls the model once. All tensors of a batch are [rows, seq]:

        input_ids, targets, documents, positions    int64, as packed rows are; targets are -100 but in answers. Sequences 2p and 2p + 1 of a
                                                    row are the chosen and the rejected answer of its pair p, each after its prompt
        reference                                   float, the targets' log-probabilities under the reference (`needs_reference`)
        desirable, baseline                         for kto, where each sequence is one answer: in column n whether sequence n is wanted,
                                                    1 or 0; and everywhere the batch's estimate of the KL (`shared.preference.baseline`)

    Metrics, each summed over the pairs: accuracy (the chosen answer has the larger reward; a tie does not count), chosen_reward,
    rejected_reward and margin (implicit rewards: beta * log(policy / reference), or beta times a log-probability where there is no
    reference), chosen_log_prob and rejected_log_prob (of the whole answers). Of kto: accuracy (the reward is on the right side of
    the baseline), margin (how far, in units of reward), baseline, log_prob.

    Raises, when called:
        ValueError: the batch lacks what the loss needs.
    """

    def __init__(self, config: DPOConfig):
        self.config = config

    def __call__(self, model: nn.Module, batch: Batch) -> Totals:
        needs = [*(["reference"] * self.config.needs_reference), *(["desirable", "baseline"] * (self.config.loss == "kto"))]
        if missing := [name for name in needs if name not in batch]:
            raise ValueError(f"dpo.loss {self.config.loss} needs {missing[0]} in each batch: wrap the loader in ReferencedLoader.")
        compare, together = (self.of_answers, 1) if self.config.loss == "kto" else (self.of_pairs, 2)
        shares = token_shares(batch["targets"], batch["documents"], together)
        return model(batch["input_ids"], head_fn=partial(compare, batch=batch), valid=shares, **apart(batch))

    def of_pairs(self, head: nn.Module, hidden_states: Tensor, batch: Batch) -> Totals:
        config = self.config
        policy, reference, lengths = answer_sums(head, hidden_states, batch)
        present = lengths[:, ::2] > 0
        # Where there is no pair, a value from which every loss and its gradient are finite, and which nothing depends on.
        chosen, rejected = (policy[:, first::2].where(present, -1.0) for first in (0, 1))
        reference_chosen, reference_rejected = (reference[:, first::2].where(present, -1.0) for first in (0, 1))
        chosen_tokens, rejected_tokens = (lengths[:, first::2].clamp(min=1) for first in (0, 1))
        sums = chosen, rejected
        if config.per_token or not config.needs_reference:
            chosen, reference_chosen = chosen / chosen_tokens, reference_chosen / chosen_tokens
            rejected, reference_rejected = rejected / rejected_tokens, reference_rejected / rejected_tokens
        rewards = [config.beta * (chosen - reference_chosen), config.beta * (rejected - reference_rejected)]
        difference = rewards[0] - rewards[1]
        match config.loss:
            case "dpo":
                losses = dpo_loss(chosen, rejected, reference_chosen, reference_rejected, config.beta, config.label_smoothing)
            case "robust":
                losses = robust_dpo_loss(difference, config.label_smoothing)
            case "hinge":
                losses = hinge_loss(difference)
            case "ipo":
                losses = ipo_loss(difference / config.beta, config.beta)
            case "simpo":
                losses = simpo_loss(chosen, rejected, config.beta, config.target_margin)
            case "orpo":
                losses = orpo_loss(chosen, rejected, config.beta)
        if config.sft_weight:
            losses = losses - config.sft_weight * sums[0] / chosen_tokens
        metrics = {"accuracy": (difference > 0).to(losses), "margin": difference}
        metrics |= {"chosen_reward": rewards[0], "rejected_reward": rewards[1], "chosen_log_prob": sums[0], "rejected_log_prob": sums[1]}
        return summed(losses, present, metrics)

    def of_answers(self, head: nn.Module, hidden_states: Tensor, batch: Batch) -> Totals:
        config, seq = self.config, batch["targets"].shape[1]
        policy, reference, lengths = (each[:, :seq] for each in answer_sums(head, hidden_states, batch))
        ratio, desirable, baseline = policy - reference, batch["desirable"] > 0, batch["baseline"].to(policy)
        losses = kto_loss(ratio, desirable, baseline, config.beta, config.desirable_weight, config.undesirable_weight)
        margin = config.beta * (ratio - baseline).where(desirable, baseline - ratio)
        metrics = {"accuracy": (margin > 0).to(losses), "margin": margin, "baseline": baseline, "log_prob": policy}
        return summed(losses, lengths > 0, metrics)


def answer_sums(head: nn.Module, hidden_states: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Each sequence's summed log-probability, the reference's (0 where the batch has none), and its number of tokens that count: [rows,
    count] each, for an even count of at least seq."""
    targets, documents = batch["targets"], batch["documents"]
    counted, count = targets != IGNORED, targets.shape[1] + targets.shape[1] % 2
    log_probs = answer_log_probs(head, hidden_states, batch)
    reference = batch["reference"].to(log_probs.dtype) if "reference" in batch else log_probs.new_zeros(targets.shape)
    parts = log_probs, reference, counted.to(log_probs.dtype)
    policy, reference, lengths = (sequence_log_probs(part, counted, documents, count) for part in parts)
    return policy, reference.detach(), lengths


def summed(losses: Tensor, present: Tensor, metrics: dict[str, Tensor]) -> Totals:
    """Totals over the pairs or answers that are present; empty slots do not count."""
    sums = {name: value.detach().where(present, 0).sum() for name, value in metrics.items()}
    return Totals(losses.where(present, 0).sum(), present.sum(), sums)
