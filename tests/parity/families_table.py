"""Measure every family against transformers in both directions, and print the table of chapter 02's page.

python tests/parity/families_table.py
"""

import tempfile
from pathlib import Path

import transformers
from families import FAMILIES, compare


def table() -> str:
    lines = [
        "| family | theirs, loaded here: logits | ours, loaded there: logits | loss, relative | gradients, relative |",
        "|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = compare(family, Path(folder))
        lines.append(f"| {name} | {found.imported:.0e} | {found.exported:.0e} | {found.loss:.0e} | {found.gradients:.0e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(table())
