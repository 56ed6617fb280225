"""Floor 0. Large imports without garbage collection (`gc`): torch's are half a million objects, all of which stay.

The collector would look through them again and again while they are made, for a tenth of the time that the import takes, and later at each
full collection. A process that is forked from this one would copy their memory, page by page, because looking writes counters into them.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def all_stays() -> Iterator[None]:
    """For imports at the start of a process: nothing is collected meanwhile, and what is there afterwards is never looked through.

    Where torch is imported already, which may be late in a process, all is as ever: then there may be garbage, too.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
