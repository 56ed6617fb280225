"""Chapter 02. Write safetensors files with the permissions that the umask says, so that others of a group can read an export.

The library writes a temporary file that only its owner may read, and renames it: weights would be 0600 in a folder of 0644.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors under their names, with the mode of any file that is created here.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be written.
    """
    path.touch()  # asks the umask without setting it, which would be the whole process's, other threads' too
    mode = path.stat().st_mode & 0o777
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)
