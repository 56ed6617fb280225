"""Chapter 06. Rendezvous of ranks that have not met yet: an empty part of the store for all of them, and who is still waited for.

A rank that never connected sends nothing, so a machine that is gone cannot be told from one that reads its packages from a slow disk: both
are waited for as long as `parallel.init_timeout` says. Meanwhile a line names who is missing.
"""

import sys
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from shared.parallel.comm.communicator import CommunicationError

FIRST, NEXT = 15.0, 60.0  # seconds of waiting before the first line about it, and between two


class Patience:
    """Says now and then who is waited for. timeout: seconds that are waited at most."""

    def __init__(self, timeout: float):
        self.timeout, self.began = timeout, time.monotonic()
        self.due = FIRST

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds until the next line, or the end."""
        return max(min(self.due, self.timeout) - self.waited, 0.001)

    def say(self, whom: str) -> None:
        """A line, where one is due. whom: as in "ranks [2, 3] to connect"."""
        if self.waited >= self.due:
            self.due += NEXT
            said = f"Waiting for {whom}: {self.waited:.0f} s so far, {self.timeout:g} at most (parallel.init_timeout)."
            print(said, file=sys.stderr, flush=True)


def fresh_store(store: dist.Store, rank: int, ranks: int, timeout: float) -> dist.Store:
    """An empty part of the rendezvous store, under a prefix that rank 0 chooses.

    torchrun restarts ranks with the store that still holds the addresses of the ranks that died. So each rank asks for the prefix under a
    name that was never used before, and rank 0 answers to it.

    Raises:
        CommunicationError: on rank 0: some ranks did not connect within `timeout` seconds.
        dist.DistError: on the others: rank 0 did not answer within them.
    """
    name, patience = uuid4().hex, Patience(timeout)
    if rank > 0:
        store.set(f"asks/{rank}", name)
        wait_for(store, f"prefix/{name}", patience, f"rank 0, to which rank {rank} of {ranks} wants to connect")
        prefix = store.get(f"prefix/{name}").decode()
        store.set(f"joined/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    while missing := [other for other in range(1, ranks) if not store.check([f"joined/{name}/{other}"])]:
        if patience.waited > timeout:
            raise CommunicationError(f"ranks {missing} did not connect within {timeout:g} s: read the output on their machines.")
        patience.say(f"ranks {missing} of {ranks} to connect")
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"prefix/{store.get(f'asks/{other}').decode()}", name)
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def wait_for(store: dist.Store, key: str, patience: Patience, whom: str) -> None:
    """Wait until a key is there.

    Raises:
        dist.DistError: it did not come in time, or the store cannot be reached.
    """
    while True:
        try:
            return store.wait([key], timedelta(seconds=patience.left))
        except dist.DistStoreError:  # its time is over; a store that is gone is a DistNetworkError
            if patience.waited >= patience.timeout:
                raise
            patience.say(whom)
