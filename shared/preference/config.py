"""Chapter 11. Configuration of preference data: pairs of a chosen and a rejected answer, or single answers with a label.

    preferences: {sources: [{path: pairs.jsonl}]}                         your own
    preferences: {made: {pairs: 3000, prompts: 120}}                      made by code (`shared.preference.made_preferences`)
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from shared.course.bounds import Bounds, NonNegativeInt, checked
from shared.finetune.chat.prepare import PAIRS, ChatConfig

MOST_PROMPTS = 200  # that are held out for the judge: of sums there are few more than a fourth as many


@dataclass(frozen=True)
@checked
class MadeConfig:
    """Pairs that code makes by a hidden preference, and held-out prompts whose answers it judges.

    Args:
        pairs: how many to train on; held-out pairs are taken from them.
        prompts: held-out prompts, which occur in no pair.
        seed: of the set.
        flipped: share of the pairs whose labels are switched, as annotators err.
        file: held-out prompts of your own, one JSON object a line with kind, prompt, answer and check; null for the set's own.
    """

    pairs: Annotated[int, Bounds(ge=40)] = 3000
    prompts: NonNegativeInt = 120
    seed: int = 0
    flipped: Annotated[float, Bounds(ge=0, lt=0.5)] = 0.0
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.prompts > MOST_PROMPTS and self.file is None:
            raise ValueError(f"made.prompts is {self.prompts}: give 0 to {MOST_PROMPTS}, or a file of your own.")


@dataclass(frozen=True)
class PreferenceConfig(ChatConfig):
    """Pairs, or single answers with labels, to learn a preference from. The first five settings are the same as for conversations.

    Args:
        sources: where they come from, one after the other.
        template: chatml, the file or folder of a template, or null for the one beside the tokenizer.
        tokenizer: the folder of the model's tokenizer; null for that of the model that training starts from.
        system: the system prompt of pairs that have none.
        held_out_share: share of the pairs that is held out for evaluation; those with the same prompt are on one side.
        made: the set that is made where sources is empty.
    """

    made: MadeConfig = field(default_factory=MadeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template == PAIRS:
            raise ValueError(f"template is {PAIRS}, which is for an encoder-decoder: give chatml, a file or folder, or null.")
