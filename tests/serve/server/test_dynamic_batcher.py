"""Dynamic batching: which requests share a batch, which are dropped before execution, and which are refused."""

from __future__ import annotations

import asyncio
import math
from time import perf_counter

import numpy as np
import pytest
from fake_server import FakeTables, until, values_of

from thermocline.errors import BadInput
from thermocline.serve.errors import DeadlineExceeded, Overloaded
from thermocline.serve.server.config import ServerLimits
from thermocline.serve.server.dynamic_batcher import MAX_LOOP_SECONDS, DynamicBatcher, QueuedRequest
from thermocline.serve.server.metrics import ModelMetrics


def request(*ids, deadline=math.inf):
    return QueuedRequest({"user": np.array(ids, np.int64)}, len(ids), deadline)


def with_batcher(test, **limits):
    """Run a test's coroutine with a batcher and its model."""

    async def run():
        model = FakeTables("tables", "")
        batcher = DynamicBatcher(model, ServerLimits(**limits), ModelMetrics("tables"))
        await test(batcher, model)
        model.hold.set()
        await batcher.close()
        assert model.closed and batcher.queued == 0

    asyncio.run(asyncio.wait_for(run(), 60))


async def busy(batcher, model):
    """Queue a request for the worker thread that ends when `model.hold` is set."""
    model.hold.clear()
    batcher._seconds_per_id = MAX_LOOP_SECONDS  # too long for the event loop
    first = batcher.enqueue(request(0))
    await asyncio.get_running_loop().run_in_executor(None, model.entered.wait, 60)
    return first


def test_an_idle_batcher_executes_at_once():
    async def test(batcher, model):
        assert batcher.is_idle(1)
        (outputs,) = batcher.execute([request(3)])
        np.testing.assert_array_equal(outputs["user"], values_of(1, "user")[[3]])
        batcher._seconds_per_id = MAX_LOOP_SECONDS
        assert not batcher.is_idle(1)

    with_batcher(test)


def test_requests_during_a_batch_form_the_next_batch():
    async def test(batcher, model):
        first = await busy(batcher, model)
        others = [batcher.enqueue(request(number)) for number in range(1, 8)]
        await asyncio.sleep(0)
        assert batcher.queued == 7
        model.hold.set()
        for number, one in enumerate([first, *others]):
            np.testing.assert_array_equal((await one)["user"], values_of(1, "user")[[number]])
        assert model.batches == [1, 5, 2], "the limit is five"

    with_batcher(test, batch=5)


def test_batches_of_the_worker_thread_are_counted():
    async def test(batcher, model):
        batcher.execute([request(1)])
        assert batcher.metrics.worker_batches == 0
        first = await busy(batcher, model)
        model.hold.set()
        await first
        assert batcher.metrics.worker_batches == 1 and model.batches == [1, 1]

    with_batcher(test)


def test_a_queue_delay_gathers_requests_until_a_batch_is_full():
    async def test(batcher, model):
        asked = [batcher.enqueue(request(number)) for number in range(3)]
        await asyncio.wait_for(asyncio.gather(*asked), 300)
        assert model.batches == [3]

    with_batcher(test, wait=3600.0, batch=3)


def test_a_batch_of_several_requests_respects_the_limit_of_ids():
    async def test(batcher, model):
        first = await busy(batcher, model)
        sizes = [4, 3, 9, 1, 1]
        others = [batcher.enqueue(request(*range(size))) for size in sizes]
        await asyncio.sleep(0)
        model.hold.set()
        await asyncio.gather(first, *others)
        assert model.batches == [1, 2, 1, 2]

    with_batcher(test, batch_ids=7)


def test_cancelled_and_expired_requests_are_dropped_before_execution():
    async def test(batcher, model):
        first = await busy(batcher, model)
        gone, late, there = (batcher.enqueue(one) for one in (request(1), request(2, deadline=perf_counter()), request(3)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        model.hold.set()
        await asyncio.gather(first, there)
        with pytest.raises(DeadlineExceeded):
            await late
        assert model.batches == [1, 1]

    with_batcher(test)


def test_a_full_queue_refuses_at_once():
    async def test(batcher, model):
        first = await busy(batcher, model)
        waiting = [batcher.enqueue(request(1)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await batcher.enqueue(request(1))
        model.hold.set()
        await asyncio.gather(first, *waiting)
        await batcher.enqueue(request(1))

    with_batcher(test, queue=3)


def test_an_invalid_request_fails_alone():
    async def test(batcher, model):
        first = await busy(batcher, model)
        good, bad, also = (batcher.enqueue(request(id)) for id in (5, -1, 6))
        await asyncio.sleep(0)
        model.hold.set()
        await first
        with pytest.raises(BadInput):
            await bad
        for id, one in ((5, good), (6, also)):
            np.testing.assert_array_equal((await one)["user"], values_of(1, "user")[[id]])
        assert model.batches == [1, 3]

    with_batcher(test)


def test_a_failed_batch_fails_each_of_its_requests_only():
    async def test(batcher, model):
        model.fail = ZeroDivisionError("made up")
        with pytest.raises(ZeroDivisionError):
            await batcher.enqueue(request(1))
        await batcher.enqueue(request(1))

    with_batcher(test)


def test_close_waits_for_queued_requests():
    async def test(batcher, model):
        first = await busy(batcher, model)
        second = batcher.enqueue(request(2))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(batcher.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done() and not model.closed
        model.hold.set()
        await asyncio.gather(first, second, closing)

    async def alone():
        model = FakeTables("tables", "")
        batcher = DynamicBatcher(model, ServerLimits(), ModelMetrics("tables"))
        await test(batcher, model)
        assert model.closed

    asyncio.run(asyncio.wait_for(alone(), 60))


def test_the_loop_stays_responsive_during_a_large_request(serve):
    import tritonclient.http as http

    running = serve()
    running.model.hold.clear()
    running.server.repository.served("tables").batcher._seconds_per_id = MAX_LOOP_SECONDS
    with http.InferenceServerClient(running.http, concurrency=2) as client:
        tensor = http.InferInput("user", [1], "INT64")
        tensor.set_data_from_numpy(np.array([4]))
        asked = client.async_infer("tables", [tensor])
        with http.InferenceServerClient(running.http) as other:
            # gevent runs the request above while these wait for the network.
            until(lambda: other.is_server_live() and running.model.entered.is_set(), "the request never reached its model")
            assert other.is_server_ready()
        running.model.hold.set()
        np.testing.assert_array_equal(asked.get_result().as_numpy("user"), values_of(1, "user")[[4]])
