"""Build 08: schedules that are refused (stage 6), and refused input (stage 10)."""

import re
from collections.abc import Callable
from typing import Any

import torch

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator
from shared.parallel.pipeline.schedules import Action

from .pieces import TEXT, TOKENS, Batch, Model, Results, actions, cut_of, even, in_words, on_pipelines, schedule_of, summed_loss


def refusal_case(
    title: str, stage: int, told: Callable[[str], bool], said: str, lists: list[list[Action]], batches: list[Batch],
    ranks: int = 2, cut: list[range] | None = None, on_making: bool = False,
) -> Case:  # fmt: skip
    """A ValueError on every rank, before anything is sent, whose sentence is as `told` says. on_making: make_pipeline must refuse."""
    cut = cut or cut_of(4, ranks)
    given = {"ranks": ranks, "cut": list(map(str, cut)), "micro-batches": len(batches)}
    given |= {} if on_making else {"schedule": in_words(lists)}
    wanted = f"ValueError that says {said}, and nothing sent"

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> str:
            group.trace.clear()
            try:
                pipeline = adapters.make_pipeline(Model(4), cut, group, summed_loss)
                if on_making:
                    return "make_pipeline accepted it"
                group.trace.clear()
                adapters.step(pipeline, batches, lists)
                return "accepted"
            except ValueError as error:
                if sent := group.trace.entries:
                    return f"{type(error).__name__} after {len(sent)} calls, the first {sent[0].description}"
                return wanted if told(str(error)) else f"{type(error).__name__}, which does not say {said}: {error}"

        [found] = on_pipelines(on_rank, ranks)
        return {f"rank {rank}": result for rank, result in enumerate(found)}

    expected = lambda **_: {f"rank {rank}": wanted for rank in range(ranks)}  # noqa: E731
    return Case("property", title, lambda: given, expected, TEXT.format(stage), observe)


def numbers_case(title: str, said: str, batches: list[Batch], **options: Any) -> Case:
    numbers = set(re.findall(r"-?\d+", said))
    told = lambda text: set(re.findall(r"-?\d+", text)) >= numbers  # noqa: E731
    return refusal_case(title, 10, told, said, schedule_of("gpipe", 2, len(batches)), batches, **options)


def refused(title: str, lists: list[str], *places: str, chunks: int = 1) -> Case:
    """places: each a rank and an action that the sentence may name, as "1 B0", or words that it must hold, as "3, 2"."""

    def names(text: str, place: str) -> bool:
        rank, _, action = place.partition(" ")
        if "," in place:
            return set(re.findall(r"\d+", text)) >= set(re.findall(r"\d+", place))
        whole_word = re.escape(action.replace(".", " of chunk ")) + r"(?! of chunk)(?!\d)"
        return re.search(rf"rank {rank}\b", text, re.IGNORECASE) is not None and re.search(whole_word, text) is not None

    spoken = [place if "," in place else "rank " + place.replace(" ", " and ").replace(".", " of chunk ") for place in places]
    told = lambda text: any(names(text, place) for place in places)  # noqa: E731
    lists_, cut = list(map(actions, lists)), cut_of(4, 2 * chunks)
    return refusal_case(title, 6, told, ", or ".join(spoken).replace(", 2", " and 2"), lists_, even(2), cut=cut)


GOOD = "F0 F1 B0 B1"
REFUSED = (
    refused("an action that is missing", [GOOD, "F0 F1 B0"], "1 B1"),
    refused("an action that is there twice", ["F0 F1 F0 B0 B1", GOOD], "0 F0"),
    refused("a backward pass before its forward pass", [GOOD, "F0 B1 F1 B0"], "1 B1"),
    refused("a micro-batch that there is not", [GOOD + " F2 B2", GOOD], "0 F2"),
    refused("a chunk that there is not", [GOOD, GOOD + " F0.1 B0.1"], "1 F0.1"),
    refused("a kind that there is not", [GOOD, "F0 F1 B0 X0 B1"], "1 X0"),
    refused("lists for three ranks", [GOOD] * 3, "3, 2"),
    refused("ranks that wait for each other", ["F0 B0 F1 B1", "F1 F0 B0 B1"], "0 B0", "1 F1"),
    refused("ranks that wait for each other in the middle", ["F0 F1 B1 B0", "F0 B0 F1 B1"][::-1], "0 B0", "1 B1"),
    refused("chunk 1 before chunk 0", ["F0.1 F0 F1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"], "0 F0.1", chunks=2),
    refused("an action of chunk 1 that is missing", ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 F1.1 B0.1 B1.1 B0"], "1 B1", chunks=2),
    refused("W that is missing", [GOOD, "F0 F1 I0 I1 W1"], "1 W0"),
    refused("W before I", [GOOD, "F0 F1 B0 W1 I1"], "1 W1"),
    refused("B, and I and W as well", [GOOD, "F0 F1 B0 B1 I0 W0"], "1 I0"),
)
BAD_INPUT = (
    numbers_case("a cut that leaves a block out", "2", even(1), cut=[range(2), range(3, 4)], on_making=True),
    numbers_case("a cut with a block in two stages", "2", even(1), cut=[range(2), range(1, 4)], on_making=True),
    numbers_case("a cut that ends too early", "3", even(1), cut=[range(2), range(2, 3)], on_making=True),
    numbers_case("three stages on two ranks", "3 and 2", even(1), cut=[range(1), range(1, 2), range(2, 4)], on_making=True),
    numbers_case("no micro-batches", "0", []),
    numbers_case("targets of another shape than the ids", "2, 3 and 4", [*even(1), (torch.zeros(2, 3).long(), torch.zeros(2, 4).long())]),
    numbers_case("an id above the vocabulary", f"{TOKENS}", [*even(1), (torch.tensor([[1, TOKENS]]), torch.tensor([[2, 3]]))]),
    numbers_case("a negative id", f"-1 and {TOKENS}", [*even(1), (torch.tensor([[1, -1]]), torch.tensor([[2, 3]]))]),
    numbers_case("a step in which no target counts", "0", [(torch.tensor([[1, 2]]), torch.tensor([[-100, -100]]))] * 2),
)
