"""Queues and micro-batches: what leaves together, what is dropped before work, what is refused."""

from __future__ import annotations

import asyncio
import math
from time import perf_counter

import numpy as np
import pytest
from running import FakeTables, until, values_of

from thermocline.errors import BadInput
from thermocline.serve.errors import Overloaded, TooLate
from thermocline.serve.server.dynamic_batcher import SHORT, Lane, Ticket
from thermocline.serve.server.limits import Limits
from thermocline.serve.server.metrics import ModelMetrics


def ticket(*ids, deadline=math.inf):
    return Ticket({"user": np.array(ids, np.int64)}, len(ids), deadline)


def in_a_lane(test, **limits):
    """Run a test's coroutine with a lane and its model."""

    async def run():
        model = FakeTables("tables", "")
        lane = Lane(model, Limits(**limits), ModelMetrics("tables"))
        await test(lane, model)
        model.hold.set()
        await lane.close()
        assert model.closed and lane.queued == 0

    asyncio.run(asyncio.wait_for(run(), 60))


async def busy(lane, model):
    """Put a request into the lane's thread that is answered when `model.hold` is set."""
    model.hold.clear()
    lane._seconds_per_id = SHORT  # as if every id took so long: the loop must not wait for it
    first = asyncio.ensure_future(lane.ask(ticket(0)))
    while not model.entered.is_set():
        await asyncio.sleep(0.001)
    return first


def test_an_idle_lane_answers_at_once():
    async def test(lane, model):
        answered = lane.ask(ticket(3))
        with pytest.raises(StopIteration) as done:
            answered.send(None)  # one step of the coroutine, and no turn of the loop
        np.testing.assert_array_equal(done.value.value["user"], values_of(1, "user")[[3]])

    in_a_lane(test)


def test_requests_that_come_during_a_batch_are_the_next_one():
    async def test(lane, model):
        first = await busy(lane, model)
        others = [asyncio.ensure_future(lane.ask(ticket(number))) for number in range(1, 8)]
        await asyncio.sleep(0)
        assert lane.queued == 7
        model.hold.set()
        for number, one in enumerate([first, *others]):
            np.testing.assert_array_equal((await one)["user"], values_of(1, "user")[[number]])
        assert model.batches == [1, 5, 2], "a batch holds five here"

    in_a_lane(test, batch=5)


def test_batches_are_counted_that_the_lanes_thread_works_on():
    async def test(lane, model):
        await lane.ask(ticket(1))
        assert lane.metrics.handed == 0
        first = await busy(lane, model)
        model.hold.set()
        await first
        assert lane.metrics.handed == 1 and model.batches == [1, 1]

    in_a_lane(test)


def test_a_budget_gathers_requests_and_a_full_batch_does_not_wait_for_it():
    async def test(lane, model):
        asked = [asyncio.ensure_future(lane.ask(ticket(number))) for number in range(3)]
        await asyncio.wait_for(asyncio.gather(*asked), 300)
        assert model.batches == [3]

    in_a_lane(test, wait=3600.0, batch=3)


def test_a_batch_has_no_more_ids_than_its_limit_but_for_one_request():
    async def test(lane, model):
        first = await busy(lane, model)
        sizes = [4, 3, 9, 1, 1]
        others = [asyncio.ensure_future(lane.ask(ticket(*range(size)))) for size in sizes]
        await asyncio.sleep(0)
        model.hold.set()
        await asyncio.gather(first, *others)
        assert model.batches == [1, 2, 1, 2]

    in_a_lane(test, batch_ids=7)


def test_who_left_and_who_is_late_is_dropped_before_work():
    async def test(lane, model):
        first = await busy(lane, model)
        gone, late, there = (
            asyncio.ensure_future(lane.ask(one)) for one in (ticket(1), ticket(2, deadline=perf_counter()), ticket(3))
        )
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        model.hold.set()
        await asyncio.gather(first, there)
        with pytest.raises(TooLate):
            await late
        assert model.batches == [1, 1]

    in_a_lane(test)


def test_a_full_queue_refuses_at_once_and_names_its_limit():
    async def test(lane, model):
        first = await busy(lane, model)
        waiting = [asyncio.ensure_future(lane.ask(ticket(1))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"3 requests wait.*limit is 3"):
            await lane.ask(ticket(1))
        model.hold.set()
        await asyncio.gather(first, *waiting)
        await lane.ask(ticket(1))

    in_a_lane(test, queue=3)


def test_an_error_of_one_request_harms_no_other():
    async def test(lane, model):
        first = await busy(lane, model)
        good, bad, also = (asyncio.ensure_future(lane.ask(ticket(id))) for id in (5, -1, 6))
        await asyncio.sleep(0)
        model.hold.set()
        await first
        with pytest.raises(BadInput):
            await bad
        for id, one in ((5, good), (6, also)):
            np.testing.assert_array_equal((await one)["user"], values_of(1, "user")[[id]])
        assert model.batches == [1, 3]

    in_a_lane(test)


def test_a_batch_that_breaks_is_everybodys_error_and_the_lane_goes_on():
    async def test(lane, model):
        model.fail = ZeroDivisionError("made up")
        with pytest.raises(ZeroDivisionError):
            await lane.ask(ticket(1))
        await lane.ask(ticket(1))

    in_a_lane(test)


def test_closing_waits_for_what_is_in_the_lane():
    async def test(lane, model):
        first = await busy(lane, model)
        second = asyncio.ensure_future(lane.ask(ticket(2)))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(lane.close())
        await asyncio.sleep(0.01)
        assert not closing.done() and not model.closed
        model.hold.set()
        await asyncio.gather(first, second, closing)

    async def alone():
        model = FakeTables("tables", "")
        lane = Lane(model, Limits(), ModelMetrics("tables"))
        await test(lane, model)
        assert model.closed

    asyncio.run(asyncio.wait_for(alone(), 60))


def test_the_loop_answers_others_while_a_large_request_is_worked_on(serve):
    import tritonclient.http as http

    running = serve()
    running.model.hold.clear()
    running.server.repository.served("tables").lane._seconds_per_id = SHORT
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
