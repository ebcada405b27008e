"""What the ranks of `test_publish_ranks.py` do within a budget of bytes."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from sharded_ranks import made, steps

import thermocline as tc


def publish_within_a_budget(
    rank: int, size: int, plan: Any, heat: Any, settings: Any, folder: str, address: str, secret: str
) -> list[Any]:  # fmt: skip
    """Train and publish a few bytes at a time, and end without the rest. Returns whether steps and rows that wait were left."""
    model, dense, _ = made(plan, heat, settings)
    publisher = tc.publish(model, folder, to=address, secret_file=secret, interval=0.0, budget="1MiB")
    (link,), sent = publisher._links, list[Any]()
    offer = link.offer
    with mock.patch.object(link, "offer", lambda part, small: (sent.append(small), offer(part, small))):
        publisher.flush(120.0)
        served = []
        for first in range(0, 18, 3):
            steps(model, dense, rank, size, first, first + 3)
            publisher._seal(0.0, 800.0)
            publisher._wait_idle(time.monotonic() + 120.0)
            served.append(publisher._check_logged() and link.wait_for(publisher.number, 120.0))
    publisher._end()
    return [all(served), any(part.steps for part in sent), len(publisher._budget._backlog.pending)]
