"""How far logits of adapters and soft prompts are from peft's: the distances that chapter 10's tests compare with their limits.

python tests/tables/adapter_differences.py         the table of chapter 10's README
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("..", "support", "finetune")]

import test_peft_experts as of_experts  # noqa: E402
import test_peft_format as formats  # noqa: E402
import test_soft_prompts as prompts  # noqa: E402
import torch  # noqa: E402


class Folders:
    """What pytest's `tmp_path_factory` does."""

    def mktemp(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=name))


def measured() -> dict[str, float]:
    """The largest distance of each kind: of tensors relative to their length, of soft prompts' logits absolute."""
    found: dict[str, float] = {}
    now = ""

    def relative(here: torch.Tensor, there: torch.Tensor) -> None:
        found[now] = max(found.get(now, 0.0), ((here - there).norm() / there.norm()).item())

    def absolute(here: torch.Tensor, there: torch.Tensor, **limits: float) -> None:
        found[now] = max(found.get(now, 0.0), (here - there).abs().max().item())

    formats.close = of_experts.close = relative
    prompts.torch.testing.assert_close = absolute
    bases, folders = formats.bases.__wrapped__(Folders()), Folders()
    for case in formats.CASES:
        now = "logits, peft reads ours"
        formats.test_peft_loads_ours(case, bases, folders.mktemp(case))
        now = "logits, we read peft's, and the merged model in transformers"
        formats.test_we_load_pefts_and_the_merged_model_is_the_same(case, bases, folders.mktemp(case))
    now, mixtures = "logits over experts, files both ways and merged", of_experts.bases.__wrapped__(Folders())
    for family in of_experts.FAMILIES:
        for targets in of_experts.TARGETS:
            of_experts.test_peft_loads_ours(family, targets, mixtures, folders.mktemp(family))
            of_experts.test_we_load_pefts_and_the_merged_model_is_the_same(family, targets, mixtures, folders.mktemp(family))
    now = "several adapters on one base"
    formats.test_several_adapters_take_part_on_one_base_or_one_or_none(bases, folders.mktemp("several"))
    base = prompts.base.__wrapped__(Folders())
    for kind in prompts.KINDS:
        now = f"{kind} tuning: logits, absolute"
        prompts.test_logits_equal_peft(kind, base)
        prompts.test_peft_loads_our_folders_and_we_load_pefts(kind, base, folders.mktemp(kind))
    return found


if __name__ == "__main__":
    for what, distance in measured().items():
        print(f"{what}: {distance:.1e}")
