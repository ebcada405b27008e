"""Thousands of corrupted requests: each is answered, or refused as the client's mistake."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import suppress
from itertools import pairwise

import grpc
import numpy as np
from fake_server import ROWS, values_of

from benchmarks.chaos.fuzz import spoiled_grpc, spoiled_http
from thermocline.serve.protocol import schema
from thermocline.serve.server.config import ServerLimits

METHOD = f"/{schema.SERVICE}/ModelInfer"
ALLOWED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


def good(ids_N):
    request = schema.ModelInferRequest(model_name="tables", raw_input_contents=[ids_N.tobytes()])
    request.inputs.add(name="user", datatype="INT64", shape=[len(ids_N)])
    return request.SerializeToString()


def test_corrupted_grpc_requests_are_answered_or_refused(served):
    draw = random.Random(7)
    ids_N = np.arange(0, ROWS, 100)
    expected = values_of(1, "user")[ids_N]

    async def ask():
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            method = channel.unary_unary(METHOD)
            outcomes = []
            for _ in range(1500):
                try:
                    schema.ModelInferResponse.FromString(await method(spoiled_grpc(draw, good(ids_N)), timeout=120))
                    outcomes.append(grpc.StatusCode.OK)
                except grpc.RpcError as error:
                    assert error.code() in ALLOWED, error
                    outcomes.append(error.code())
                if draw.random() < 0.05:
                    response = schema.ModelInferResponse.FromString(await method(good(ids_N), timeout=120))
                    rows_ND = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(expected.shape)
                    np.testing.assert_array_equal(rows_ND, expected)
            return outcomes

    outcomes = asyncio.run(ask())
    assert sum(code is not grpc.StatusCode.OK for code in outcomes) > len(outcomes) / 2


def test_corrupted_http_requests_are_answered_or_refused(serve):
    draw = random.Random(8)
    running = serve(limits=ServerLimits(slow=3600, drain=3))
    statuses = []
    for _ in range(400):
        if got := running.cut_off(spoiled_http(draw, "tables", "user")):  # an incomplete header gets no response
            statuses.append(int(got.split(b" ", 2)[1]))
    assert set(statuses) <= {200, 400, 404, 405, 408, 411, 413, 417, 421, 431}, set(statuses)
    assert sum(status == 400 for status in statuses) > 100


def test_refused_requests_leak_no_objects(served):
    """After hundreds of refused requests there are as many objects as before."""

    def refuse(times):
        with grpc.insecure_channel(served.grpc) as channel:
            for _ in range(times):
                with suppress(grpc.RpcError):
                    channel.unary_unary(METHOD)(b"\xff\xfe", timeout=120)
        gc.collect()
        return len(gc.get_objects())

    counted = [refuse(300) for _ in range(4)]
    # A leak would show in every round.
    assert min(after - before for before, after in pairwise(counted)) < 100, counted
    batcher = served.server.repository.served("tables").batcher
    assert batcher.queued == 0 and not batcher._executing
