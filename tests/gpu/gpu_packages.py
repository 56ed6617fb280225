"""The packages that the slices need, and those that they compare with or write to where they are installed.

`shared/` needs more (click, nbclient, jupyter ...) for its notebooks and its command line, which no slice starts.
"""

import sys
from importlib.util import find_spec

NEEDED = {  # import name -> name on the package index
    "torch": "torch", "numpy": "numpy", "safetensors": "safetensors", "tokenizers": "tokenizers", "rich": "rich", "yaml": "pyyaml",
    "jinja2": "jinja2", "matplotlib": "matplotlib", "psutil": "psutil", "cloudpickle": "cloudpickle", "pyarrow": "pyarrow", "ftfy": "ftfy",
    "jsonargparse": "jsonargparse[signatures]",
}  # fmt: skip
PEERS = {
    "transformers": "the speed slice compares with it", "tensorboard": "the trainer slice writes to it",
    "pynvml": "utilisation in the trainer's log (nvidia-ml-py)", "triton": "torch.compile needs it; it comes with PyTorch for CUDA",
}  # fmt: skip


def missing(names) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def require() -> None:
    """Leave with the command that installs what is missing."""
    if absent := missing(NEEDED):
        wanted = " ".join(f"'{NEEDED[name]}'" for name in absent)
        sys.exit(f"The slices need {', '.join(absent)}: python -m pip install {wanted}")


def in_words() -> str:
    absent = missing(NEEDED)
    lines = [f"Needed packages: {', '.join(NEEDED)}; missing: {', '.join(absent) or 'none'}."]
    lines += [f"Optional: {name}, {'there' if find_spec(name) else 'missing'}: {purpose}." for name, purpose in PEERS.items()]
    return "\n".join(lines)
