#!/usr/bin/env bash
# transformers 5.23.0, from_pretrained(gguf_file=...) on files of the architecture "llama"; seen with Python 3.11 on Linux, in November 2026.
#
# A GGUF file says in its metadata how RoPE's frequencies are scaled (rope.scaling.type linear or yarn), holds the divisors of Llama 3.1 and 3.2
# as a tensor, rope_freqs.weight, and may hold biases of the attention's projections. transformers reads none of the three: no error and no
# warning, and other logits than llama.cpp's for the same file. Without them both agree to rounding. Here with one random model, written by
# gguf's own writer, and the log-probabilities of the next token.
#
# Read such a model from its safetensors, or compare a few logits with llama.cpp's before training on it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "transformers==5.23.0" "gguf==0.19.0" "accelerate==1.15.0" "xllamacpp==2026.10.11549"

cat >"$folder/loader.py" <<'PYTHON'
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
import xllamacpp
from transformers import AutoModelForCausalLM

WIDTH, HEADS, ROWS, LAYERS = 64, 4, 300, 2
HEAD, folder = WIDTH // HEADS, Path(tempfile.mkdtemp())
ALPHABET = [chr(number) for number in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]] + ["he"]  # byte-level BPE's
PROMPTS = [[7, 31, 5, 120, 44, 260, 9, 81, 3, 17][:length] * 3 for length in range(3, 11)]


def write(name: str, keys: dict[str, object], factors: bool = False, biases: bool = False) -> Path:
    """A LLaMA with random weights, as llama.cpp names its parts."""
    numbers = np.random.default_rng(0)
    file = gguf.GGUFWriter(folder / f"{name}.gguf", "llama")
    file.add_context_length(2048)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(96)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10000.0)
    file.add_rope_dimension_count(HEAD)
    file.add_vocab_size(ROWS)
    for key, value in keys.items():
        (file.add_string if isinstance(value, str) else file.add_uint32 if isinstance(value, int) else file.add_float32)(f"llama.{key}", value)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list([*ALPHABET, *(f"<{number}>" for number in range(ROWS - len(ALPHABET)))])
    file.add_token_types([1] * len(ALPHABET) + [3] * (ROWS - len(ALPHABET)))
    file.add_token_merges(["h e"])
    file.add_bos_token_id(ROWS - 2)
    file.add_eos_token_id(ROWS - 1)
    file.add_add_bos_token(False)

    def add(tensor: str, *shape: int, around: float = 0.0, scale: float = 0.3) -> None:
        file.add_tensor(tensor, (around + scale * numbers.standard_normal(shape)).astype(np.float32))

    add("token_embd.weight", ROWS, WIDTH)
    add("output.weight", ROWS, WIDTH)
    add("output_norm.weight", WIDTH, around=1.0, scale=0.1)
    for layer in range(LAYERS):
        for part, rows, columns in (("attn_q", WIDTH, WIDTH), ("attn_k", WIDTH, WIDTH), ("attn_v", WIDTH, WIDTH), ("attn_output", WIDTH, WIDTH),
                                    ("ffn_gate", 96, WIDTH), ("ffn_up", 96, WIDTH), ("ffn_down", WIDTH, 96)):
            add(f"blk.{layer}.{part}.weight", rows, columns)
        for part in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{part}.weight", WIDTH, around=1.0, scale=0.1)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output") if biases else ():
            add(f"blk.{layer}.{part}.bias", WIDTH)
    if factors:
        file.add_tensor("rope_freqs.weight", np.linspace(1, 8, HEAD // 2, dtype=np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return folder / f"{name}.gguf"


def of_llama_cpp(path: Path) -> list[np.ndarray | None]:
    """Log-probabilities of the next token behind each prompt; None where the likeliest token is no whole character."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = str(path), 128, 1, False, 0
    settings.cpuparams.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server, found = xllamacpp.Server(settings), []
    for prompt in PROMPTS:
        asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": ROWS, "cache_prompt": False}
        said = server.handle_completions(asked)["choices"][0]["logprobs"]
        known = {each["id"]: each["logprob"] for each in said["content"][0]["top_logprobs"]} if said else None
        found.append(known and np.array([known[number] for number in range(ROWS)]))
    return found


def of_transformers(path: Path) -> list[np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        return [torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1).numpy() for prompt in PROMPTS]


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
FILES = {
    "plain": write("plain", {}),
    "linear scaling of RoPE": write("linear", LINEAR),
    "YaRN": write("yarn", YARN),
    "rope_freqs.weight": write("factors", {}, factors=True),
    "biases of attention": write("biases", {}, biases=True),
}
apart = {}
for name, path in FILES.items():
    pairs = [(one, other) for one, other in zip(of_llama_cpp(path), of_transformers(path), strict=True) if one is not None]
    apart[name] = max(float(np.abs(one - other).max()) for one, other in pairs)
    print(f"{name:24} largest difference of {len(pairs)} x {ROWS} log-probabilities {apart[name]:.6f}")
kept, lost = [apart.pop("plain")], list(apart.values())
sys.exit(0 if max(kept) < 1e-4 and min(lost) > 0.05 else "The behaviour has changed.")
PYTHON
TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" -W ignore "$folder/loader.py" 2>"$folder/noise" || { cat "$folder/noise" >&2; exit 1; }
echo "As described: transformers reads neither RoPE's scaling nor its divisors nor the biases of a GGUF file of this architecture."
