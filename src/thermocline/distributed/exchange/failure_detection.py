"""Which ranks are gone, once an exchange has failed: those that do not say so too.

An exchange that fails does not know why: a connection was closed, or nothing came in time. But every rank that is alive sees
its exchanges fail, and says it in the store by which ranks once found each other. Who has said nothing after a while has ended,
or hangs, or is busy elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

PATIENCE = 10.0  # seconds
_KEY = "thermocline/exchange failed/"


def silent_ranks(ranks: Sequence[int], mine: int) -> list[int] | None:
    """Of some ranks those that have not told, in the time that they have for it, that an exchange of theirs failed too."""
    until = time.monotonic() + PATIENCE
    left = [rank for rank in ranks if rank != mine]
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_KEY}{mine}", "1")
        while left := [rank for rank in left if not store.check([f"{_KEY}{rank}"])]:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
    except Exception:  # the store was kept by a process that is gone
        return None
    return left
