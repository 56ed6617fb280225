"""Chapter 11. KTO's baseline: an estimate of the KL divergence from the reference, by answers that stand after other prompts.

KTO asks of an answer that it gains more than answers do on the whole. What these gain is the mean of log(policy / reference) over prompts
with another prompt's answer, and never below 0 (Ethayarajh et al. 2024, section 4.1).

    row of the batch          prompt 0, answer 0 | prompt 1, answer 1 | prompt 2, answer 2
    row that is scored        prompt 0, answer 2 | prompt 1, answer 0 | prompt 2, answer 1

**Splits.** Answers change places within their row alone, and the mean is over all rows of a step, in whichever micro-batches and ranks they
are: it is taken before the first micro-batch. So it is the same number for every split, but for the order of its sum. It costs a forward
pass of both models.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shared.data.packing import pack_documents
from shared.data.rows import masked, padding_row, stack_rows
from shared.loss import IGNORED
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.preference.reference import ReferencedLoader, Score
from shared.totals import Batch


class BaselinedLoader(ReferencedLoader):
    """Another loader's batches with their `baseline`: [rows, seq] float, everywhere the estimate of their step.

    Args:
        loader: yields steps, which are lists of micro-batches; or batches, which together are one step: an evaluation.
        score: of the reference.
        policy: of the policy as it is when a step is asked for, after the update before it.
        data: the ranks that share out each step.
    """

    def __init__(self, loader: Iterable, score: Score, policy: Score, data: Communicator | None = None):
        super().__init__(loader, score)
        self.policy, self.data = policy, data or SingleRankCommunicator()

    def __iter__(self) -> Iterator:
        batches = []
        for step in self.loader:
            if isinstance(step, list):
                yield self.baselined(step)
            else:
                batches.append(step)
        if batches:
            yield from self.baselined(batches)

    def baselined(self, step: list[Batch]) -> list[Batch]:
        total = None
        for batch in map(exchanged, step):
            gained = (self.policy(batch) - self.score(batch)).double().sum()
            found = torch.stack([gained, count_answers(batch).to(gained)])
            total = found if total is None else total + found
        self.data.all_reduce(total)
        baseline = (total[0] / total[1].clamp(min=1)).clamp(min=0)
        return [batch | {"baseline": baseline.expand(batch["targets"].shape).to(batch["targets"].device)} for batch in step]


def count_answers(batch: Batch) -> Tensor:
    """How many sequences of a batch have a target: []."""
    counted = (batch["targets"] != IGNORED).int()
    return torch.zeros_like(counted).scatter_add_(1, batch["documents"].clamp(min=0), counted).count_nonzero()


def exchanged(batch: Batch) -> Batch:
    """A batch in which each prompt of a row has the answer of the sequence before it. A row with fewer than two has no target."""
    rows = zip(batch["input_ids"], batch["targets"], batch["documents"], strict=True)
    return stack_rows([exchanged_row(*row) for row in rows])


def exchanged_row(input_ids: Tensor, targets: Tensor, documents: Tensor) -> Batch:
    """[seq] each. An answer begins with the first target; what follows its last one is left out."""
    prompts, answers, marks = [], [], []
    for number in range(int(documents.max()) + 1):
        ids, own = input_ids[documents == number], targets[documents == number]
        trained = (own != IGNORED).nonzero()[:, 0]
        if len(trained) == 0:
            continue
        first, last = int(trained[0]), int(trained[-1])
        following = torch.where(own != IGNORED, own, torch.cat([ids[1:], ids[:1]]))  # an untrained token within an answer is an input
        prompts.append(ids[: first + 1])
        answers.append(following[first : last + 1])
        marks.append(own[first : last + 1] != IGNORED)
    seq = len(input_ids)
    if len(prompts) < 2:
        return padding_row(seq)
    answers, marks = answers[-1:] + answers[:-1], marks[-1:] + marks[:-1]
    read = [torch.zeros(len(prompt) - 1, dtype=torch.bool) for prompt in prompts]
    row = pack_documents([torch.cat(both) for both in zip(prompts, answers, strict=True)], seq)
    return masked(row, [torch.cat(both).numpy() for both in zip(read, marks, strict=True)])
