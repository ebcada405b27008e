"""Clients over the network, in their own process. Each sends its next request when a response arrives.

    {"address": ..., "pid": of the server, "clients": 8, "seconds": 3, "ids": 64, "rows": 1000000, "features": ["t"]}

is the input as JSON; the output is the measurement. Requests are serialized beforehand and responses are not parsed, so that
clients take little of the processor that they share with the server. The benchmark measures the processor time of the server
and its children, not the clock, because one machine runs both.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from thermocline.serve.protocol import schema

METHOD = f"/{schema.SERVICE}/ModelInfer"
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
DIFFERENT = 256  # requests that are asked in turn
WARM_S = 0.5


def requests(ids: int, rows: int, features: Sequence[str]) -> tuple[list[bytes], np.ndarray[Any, np.dtype[np.int64]]]:
    """Serialized requests, and the ids of each, the same for all features."""
    ids_RN = np.random.default_rng(11).integers(0, rows, (DIFFERENT, ids))
    made = []
    for ids_N in ids_RN:
        message = schema.ModelInferRequest(model_name="tables", raw_input_contents=[ids_N.tobytes()] * len(features))
        for feature in features:
            message.inputs.add(name=feature, datatype="INT64", shape=[ids])
        made.append(message.SerializeToString())
    return made, ids_RN


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its children, so far."""
    parents: dict[int, list[int]] = {}
    spent: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended just now
            spent[int(entry.name)] = int(fields[11]) + int(fields[12])
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        total += spent.get(one, 0)
        waiting += parents.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")


async def measure(job: dict[str, Any]) -> dict[str, float]:
    """Requests per second of the server's processor time, and latencies of the clients."""
    asked, _ = requests(job["ids"], job["rows"], job["features"])
    waits: list[float] = []
    stop = False

    async def client(number: int) -> None:
        async with grpc.aio.insecure_channel(job["address"], options=OPTIONS) as channel:
            ask, turn = channel.unary_unary(METHOD), number * 7
            while not stop:
                begin = time.perf_counter()
                await ask(asked[turn % DIFFERENT])
                waits.append(time.perf_counter() - begin)
                turn += 1

    clients = [asyncio.ensure_future(client(number)) for number in range(job["clients"])]
    await asyncio.sleep(WARM_S)
    waits.clear()
    before, begin = cpu_seconds(job["pid"]), time.perf_counter()
    spent, passed, count = 0.0, 0.0, 0
    while not spent or not count:  # on a busy machine the first stretch may have nothing to count
        ended, _ = await asyncio.wait(clients, timeout=job["seconds"], return_when=asyncio.FIRST_COMPLETED)
        if ended:
            await asyncio.gather(*clients)  # why they ask no more
        spent, passed, count = cpu_seconds(job["pid"]) - before, time.perf_counter() - begin, len(waits)
    p50, p99 = np.quantile(waits[:count], (0.5, 0.99)).tolist()
    stop = True
    await asyncio.gather(*clients)
    return {"requests_per_cpu_s": count / spent, "requests_per_s": count / passed, "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(json.load(sys.stdin)))))
