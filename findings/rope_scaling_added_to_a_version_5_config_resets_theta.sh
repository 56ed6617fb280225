#!/usr/bin/env bash
# transformers 5.23.0, AutoConfig on a config.json with rope_parameters and rope_scaling; seen with Python 3.11 on Linux, in November 2026.
#
# transformers 5 writes RoPE's base inside `rope_parameters`. To read longer texts, users of Qwen and others add a `rope_scaling` block to
# config.json, as instructions from the time of version 4 say. Version 5 takes that block in place of `rope_parameters`, and the base that was
# in there is lost: here 1,000,000 becomes the class's default, 10,000. No error and no warning; every frequency but the first changes, and the
# model answers from other rotations. A base beside the block, at the top level, is taken.
#
# Put the scaling's keys into `rope_parameters`, or add `rope_theta` at the top level.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "transformers==5.23.0"

cat >"$folder/theta.py" <<'PYTHON'
import json
import sys
import tempfile
from pathlib import Path

import transformers
from transformers import AutoConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
folder = Path(tempfile.mkdtemp())
Qwen3Config(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}).save_pretrained(folder)
written = json.loads((folder / "config.json").read_text())


def read(**added) -> tuple[float, float]:
    """The base, and the slowest frequency in radians a position."""
    (folder / "config.json").write_text(json.dumps(written | added))
    config = AutoConfig.from_pretrained(folder)
    return config.rope_parameters["rope_theta"], Qwen3RotaryEmbedding(config).inv_freq[-1].item()


print(f"transformers {transformers.__version__} wrote {written['rope_parameters']}")
plain, added, both = read(), read(rope_scaling=YARN), read(rope_scaling=YARN, rope_theta=1_000_000.0)
for name, (theta, slowest) in {"as written": plain, "with rope_scaling": added, "and rope_theta": both}.items():
    print(f"{name:18} theta {theta:>11,.0f}   slowest frequency {slowest:.2e}")
sys.exit(0 if (plain[0], added[0], both[0]) == (1e6, 1e4, 1e6) and added[1] > 10 * both[1] else "The behaviour has changed.")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/theta.py"
echo "As described: rope_scaling beside rope_parameters resets the base to the class's default."
