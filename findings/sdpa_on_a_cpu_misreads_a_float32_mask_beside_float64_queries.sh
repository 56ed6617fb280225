#!/usr/bin/env bash
# torch 2.13.0, scaled_dot_product_attention on a CPU; seen with Python 3.11 on Linux x86-64, in November 2026.
#
# Queries, keys and values in float64, and an additive mask in float32: accepted without a word, and the result is wrong by as much as the
# values are large (0.5 to 1.5 for values of a standard normal distribution). The flash kernel reads the mask as if its numbers followed each
# other at another distance: few keys (3 here) come out right, from a vector register's worth of float32 numbers on they do not (8 keys with
# AVX2, which is chosen below; 16 with AVX-512, so a small test can pass on one machine and fail on another). The math kernel is right for the
# same arguments, and so is the flash kernel with the mask in float64, with float32 queries, and with bfloat16 queries beside a float32 mask.
#
# Whom it hurts: parity tests. They raise a model to float64 to compare to 1e-9, and an ALiBi or relative bias, or a mask that was made in
# float32, stays behind; then the reference is what is wrong. Cast the mask to the queries' dtype, or choose SDPBackend.MATH.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"

cat >"$folder/compare.py" <<'PYTHON'
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)


def distance(keys: int, dtype: torch.dtype, mask_dtype: torch.dtype, backend: SDPBackend) -> float:
    """Of the kernel's result from softmax(q k^T / sqrt(d) + mask) v in float64."""
    q, k, v = (torch.randn(1, 2, length, 16).to(dtype) for length in (3, keys, keys))
    mask = torch.linspace(0, 3, keys).expand(1, 1, 3, keys).to(mask_dtype)
    with sdpa_kernel(backend):
        result = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = q.double() @ k.double().transpose(-2, -1) / 16**0.5 + mask.double()
    return (result.double() - scores.softmax(-1) @ v.double()).abs().max().item()


FLASH, MATH, DOUBLE, SINGLE = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, torch.float64, torch.float32
print(f"torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}")
wrong = {keys: distance(keys, DOUBLE, SINGLE, FLASH) for keys in (8, 11, 64)}
right = {
    "3 keys": distance(3, DOUBLE, SINGLE, FLASH),
    "64 keys, math kernel": distance(64, DOUBLE, SINGLE, MATH),
    "64 keys, mask in float64": distance(64, DOUBLE, DOUBLE, FLASH),
    "64 keys, queries in float32": distance(64, SINGLE, SINGLE, FLASH),
    "64 keys, queries in bfloat16": distance(64, torch.bfloat16, SINGLE, FLASH),
}
print("float64 queries, float32 mask, flash kernel, by keys:", {keys: f"{error:.1e}" for keys, error in wrong.items()})
print("right:", {name: f"{error:.1e}" for name, error in right.items()})
sys.exit(not (all(error > 0.01 for error in wrong.values()) and all(error < 0.02 for error in right.values())))
PYTHON

if ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/compare.py"; then
    echo "As recorded: the results are wrong, without an error."
else
    echo "This has changed: compare with the head of this file." >&2
    exit 1
fi
