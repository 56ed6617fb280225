#!/usr/bin/env bash
# datasets 5.2.0, the feature Json of fields whose values differ in type; seen with Python 3.11 on Linux, in November 2026.
#
# `load_dataset("json")` and `from_list(on_mixed_types="use_json")` keep a field whose values differ in type as JSON text, and give the values
# back when rows are read. Two of them come back as others, without a warning: a float has ten decimals left, so 0.3563574924719273 is
# 0.3563574925; and a text that is itself JSON is stored as it stands, so the texts "1", "null" and "[1]" are a number, a null and a list.
# Arguments of tools whose keys differ from call to call are such a field, and so is a content that is text here and a list of parts there.
#
# Keep such values as JSON text of your own (json.dumps), in a field that is text in every row.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "datasets==5.2.0"

cat >"$folder/mixed.py" <<'PYTHON'
import json
import sys
import tempfile
from pathlib import Path

import datasets

datasets.disable_progress_bars()
GIVEN = [0.3563574924719273, "1", "null", "[1]", [2]]
rows = [{"x": value} for value in GIVEN]
folder = Path(tempfile.mkdtemp())
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
ways = {
    "from_list": datasets.Dataset.from_list(rows, on_mixed_types="use_json"),
    "load_dataset": datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache")),
}
changed = {name: [value for value in GIVEN if value not in list(read["x"])] for name, read in ways.items()}
for name, read in ways.items():
    print(f"datasets {datasets.__version__}, {name:12}: {GIVEN} comes back as {list(read['x'])}")
sys.exit(0 if all(changed.values()) else "The behaviour has changed.")
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/mixed.py"
echo "As described: values of a field of mixed types come back as others."
