"""Check of 03.mask_tokens. Oracle: the paper's rule, one token after the other in Python. It does what transformers'
DataCollatorForLanguageModeling does with the same draws (`tests/parity/test_check_oracles.py`). Ids are whole numbers: results are
compared exactly.

Tolerance. One case looks at shares among 4,800 chosen tokens, whose standard deviation is at most 0.6 percent; it allows 3.
"""

from itertools import product

import torch
from torch import Tensor

from shared.course.checking import Case, Check

from .pieces import CONTRACT, ids

ORACLE = "the rule of the paper, one token after the other"
PAPER = "Devlin et al. 2019, section 3.1"
MASK = 3


def by_the_rule(input_ids, special, selection, fate, replacements, mask_id, rate=0.15):
    inputs, targets = input_ids.clone(), input_ids.clone()
    for place in product(*map(range, input_ids.shape)):
        if special[place] or selection[place] >= rate:
            targets[place] = -100
        elif fate[place] < 0.8:
            inputs[place] = mask_id
        elif fate[place] < 0.9:
            inputs[place] = replacements[place]
    return {"inputs": inputs, "targets": targets}


def random(batch: int, seq: int, seed: int, **options):
    def given():
        generator = torch.Generator().manual_seed(seed)
        draw = lambda: torch.rand(batch, seq, generator=generator)  # noqa: E731
        number = lambda: torch.randint(5, 97, (batch, seq), generator=generator)  # noqa: E731
        special = draw() < 0.2
        return {
            "input_ids": number(), "special": special, "selection": draw(), "fate": draw(), "replacements": number(),
            "mask_id": MASK, **options,
        }  # fmt: skip

    return given


def case_of(input_ids: list[int], special: list[int], selection: list[float], fate: list[float], **options):
    """One row; random tokens are 91, 92, 93, ..."""
    return lambda: {
        "input_ids": ids(*input_ids)[None], "special": torch.tensor(special).bool()[None], "selection": torch.tensor(selection)[None],
        "fate": torch.tensor(fate)[None], "replacements": torch.arange(91, 91 + len(input_ids))[None], "mask_id": MASK, **options,
    }  # fmt: skip


def rows(inputs: list[int], targets: list[int]):
    return lambda **given: {"inputs": ids(*inputs)[None], "targets": ids(*targets)[None]}


def counts(function, **given):
    """Shares in a large batch: what becomes of the chosen, and whether anything else was touched."""
    inputs, targets = function(**given)
    chosen, before = targets != -100, given["input_ids"]
    masked, kept = (inputs == MASK)[chosen], (inputs == before)[chosen]

    def percent(found: Tensor) -> float:
        return 100 * found.double().mean().item()

    return {
        "percent chosen": percent(chosen), "of these masked": percent(masked), "of these kept": percent(kept & ~masked),
        "of these replaced": percent(~masked & ~kept), "others changed": int((inputs != before)[~chosen].sum()),
        "targets that are not the original": int((targets != before)[chosen].sum()),
        "special tokens touched": int(chosen[given["special"]].sum()),
    }  # fmt: skip


def shared(function, **given):
    """Arguments whose memory a result uses: writing to the result would change them."""
    results = function(**given)
    places = {result.untyped_storage().data_ptr() for result in results}
    return {
        "arguments that share memory with a result": [
            name for name, value in given.items() if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in places
        ]
    }


def large():
    given = random(200, 200, seed=5)()
    return given | {"special": torch.arange(200).remainder(5).eq(0).expand(200, 200).clone()}


CHECK = Check(
    exercise="03.mask_tokens",
    outputs=("inputs", "targets"),
    spoilt=("inputs", "targets"),
    cases=[
        Case("shape and dtype", "three rows of 11", random(3, 11, seed=1), by_the_rule, CONTRACT),
        Case(
            "worked example", "five chosen tokens with five fates",
            case_of([11, 12, 13, 14, 15], [0] * 5, [0.1] * 5, [0.2, 0.79, 0.81, 0.89, 0.91]),
            rows([3, 3, 93, 94, 15], [11, 12, 13, 14, 15]), PAPER,
        ),
        Case(
            "worked example", "chosen or not, each with the same fate",
            case_of([11, 12, 13, 14], [0] * 4, [0.1, 0.14, 0.16, 0.9], [0.2] * 4),
            rows([3, 3, 13, 14], [11, 12, -100, -100]), "the contract: chosen where selection is below 0.15",
        ),
        Case(
            "worked example", "a replacement and a kept token among those that were not chosen",
            case_of([11, 12, 13, 14], [0] * 4, [0.5, 0.1, 0.5, 0.1], [0.85, 0.85, 0.95, 0.95]),
            rows([11, 92, 13, 14], [-100, 12, -100, 14]), PAPER,
        ),
        Case(
            "worked example", "special tokens are never chosen", case_of([1, 12, 13, 0], [1, 0, 1, 1], [0.1] * 4, [0.2, 0.2, 0.85, 0.95]),
            rows([1, 3, 13, 0], [-100, 12, -100, -100]), CONTRACT,
        ),
        Case(
            "worked example", "draws that lie on the borders",
            case_of([11, 12, 13, 14], [0] * 4, [0.0, 0.1, 0.15, 0.1], [0.0, 0.8, 0.0, 0.9]), rows([3, 92, 13, 14], [11, 12, -100, 14]),
            "the contract: selection < rate, fate < 0.8, 0.8 <= fate < 0.9",
        ),
        Case(
            "worked example", "a rate of 0.5", case_of([11, 12, 13], [0] * 3, [0.1, 0.4, 0.6], [0.2, 0.85, 0.2], rate=0.5),
            rows([3, 92, 13], [11, 12, -100]), CONTRACT,
        ),
        Case(
            "worked example", "a rate of 0 chooses nothing", case_of([11, 12, 13], [0] * 3, [0.0, 0.1, 0.5], [0.2, 0.85, 0.2], rate=0.0),
            rows([11, 12, 13], [-100] * 3), CONTRACT,
        ),
        Case(
            "worked example", "no draw is below the rate", case_of([11, 12, 13], [0] * 3, [0.9, 0.5, 0.2], [0.2, 0.85, 0.95]),
            rows([11, 12, 13], [-100] * 3), "the contract: nothing is chosen beyond what the draws say",
        ),
        Case(
            "worked example", "nothing but special tokens", case_of([1, 2, 0], [1] * 3, [0.1, 0.0, 0.1], [0.2, 0.85, 0.95]),
            rows([1, 2, 0], [-100] * 3), CONTRACT,
        ),
        Case(
            "worked example", "a replacement that is the token itself", case_of([91, 92, 13], [0] * 3, [0.1] * 3, [0.85, 0.85, 0.85]),
            rows([91, 92, 93], [91, 92, 13]), "the contract: it was chosen, so it is a target",
        ),
        Case(
            "worked example", "a replacement of 0",
            lambda: case_of([11, 12], [0] * 2, [0.1] * 2, [0.85] * 2)() | {"replacements": ids(0, 0)[None]},
            rows([0, 0], [11, 12]), CONTRACT,
        ),
        Case(
            "worked example", "tokens that are the mask token, or 0, before anything is masked",
            case_of([MASK, 0, MASK, 0], [0] * 4, [0.1, 0.1, 0.9, 0.9], [0.2, 0.95, 0.2, 0.2]), rows([3, 0, 3, 0], [3, 0, -100, -100]),
            CONTRACT,
        ),
        Case(
            "worked example", "a mask token of 0, and ids above 65,535",
            lambda: case_of([70_000, 65_536, 40_000], [0] * 3, [0.1, 0.1, 0.9], [0.2, 0.95, 0.2])() | {"mask_id": 0},
            rows([0, 65_536, 40_000], [70_000, 65_536, -100]), CONTRACT,
        ),
        Case(
            "property", "new tensors, also where nothing is chosen", random(2, 7, seed=6, rate=0.0),
            lambda **given: {"arguments that share memory with a result": []}, "the contract: left unchanged", shared,
        ),
        Case(
            "property", "the shares of 40,000 tokens, a fifth of them special", large,
            lambda **given: {
                "percent chosen": 12.0, "of these masked": 80.0, "of these kept": 10.0, "of these replaced": 10.0, "others changed": 0,
                "targets that are not the original": 0, "special tokens touched": 0,
            },
            "arithmetic: 15 % of four fifths, and of these 80, 10 and 10 %", counts, rtol=0, atol=3,
        ),
        Case("oracle", "random draws, four rows of 53", random(4, 53, seed=2), by_the_rule, ORACLE),
        Case("oracle", "random draws at a rate of 0.4", random(4, 53, seed=3, rate=0.4), by_the_rule, ORACLE),
        Case("oracle", "one long row at a rate of 1: everything is chosen", random(1, 211, seed=4, rate=1.0), by_the_rule, ORACLE),
    ],
)
