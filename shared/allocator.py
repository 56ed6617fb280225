"""Chapter 02. Keep the memory that one training step frees for the next one.

A step allocates hundreds of megabytes and frees them all. By default the C library hands large blocks back to the operating
system at once, and the next step pays for fetching and clearing the same pages again, one page fault for every 4 KiB.
GPUs do not have the problem: PyTorch caches their memory itself.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory in this process, until it ends. Numbers stay the same.

    Returns:
        Whether it listened: glibc on Linux does; elsewhere nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    never_trim = mallopt(M_TRIM_THRESHOLD, -1)
    never_map = mallopt(M_MMAP_MAX, 0)  # a mapped block would be handed back when it is freed, however large
    return bool(never_trim and never_map)
