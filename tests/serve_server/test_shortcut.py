"""Requests that come again: answered in fewer steps, with the same bytes."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import weakref
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thermocline
from benchmarks.chaos.fuzz import spoiled_grpc
from thermocline.errors import BadInput
from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import head_of, read_request, varint, write_response
from thermocline.serve.server import fast_path as shortcut
from thermocline.serve.server.fast_path import LENGTHS, OF_LENGTH
from thermocline.serve.server.grpc_server import OverGrpc
from thermocline.serve.server.inference_service import Desk
from thermocline.serve.server.limits import Limits
from thermocline.serve.server.model_loader import Cards, make_repository

ROWS = 211
TABLES = [thermocline.Table("user", ROWS, 7), thermocline.Table("item", 53, 12)]


def request(ids, feature="user", **fields):
    message = schema.ModelInferRequest(model_name="tables", raw_input_contents=[np.asarray(ids, np.int64).tobytes()], **fields)
    message.inputs.add(name=feature, datatype="INT64", shape=[len(ids)])
    return message.SerializeToString()


# -- heads --------------------------------------------------------------------------------------------------------------------


@st.composite
def messages(draw):
    """Bytes of requests, in the usual order and in others, with fields that nobody knows."""
    draws = random.Random(draw(st.integers(0, 1 << 32)))
    message = schema.ModelInferRequest(model_name=draw(st.text(max_size=5)), model_version=draw(st.sampled_from(["", "1"])))
    for _ in range(draw(st.integers(0, 2))):
        message.inputs.add(
            name=draw(st.text(max_size=3)), datatype="INT64", shape=draw(st.lists(st.integers(-1, 9), max_size=2))
        )
    raw = draw(st.lists(st.binary(max_size=40), max_size=2))
    parts = [message.SerializeToString(), *(b"\x3a" + varint(len(each)) + each for each in raw)]
    if raw and draw(st.booleans()):  # a field that looks as if it were the values, and is not
        parts.append(b"\xa2\x06" + varint(len(parts[-1])) + parts[-1])
    if draw(st.booleans()):
        draws.shuffle(parts)
    data = bytearray(b"".join(parts))
    for _ in range(draw(st.sampled_from([0, 0, 1, 3])) if data else 0):
        data[draws.randrange(len(data))] = draws.choice((0, 1, 0x3A, draws.randrange(256)))
    return bytes(data)


def parsed(data):
    try:
        return schema.ModelInferRequest.FromString(data)
    except Exception:
        return None


@given(messages(), st.randoms(use_true_random=False))
@settings(max_examples=600, deadline=None)
def test_a_request_is_its_head_and_values_behind_it_as_protobuf_reads_it(data, draws):
    message = parsed(data)
    head = None if message is None else head_of(data)
    if head is None:
        return
    assert data.startswith(head)
    values = draws.randbytes(len(data) - len(head))
    message.raw_input_contents[0] = values
    assert parsed(head + values) == message


def test_most_requests_have_a_head_and_those_that_only_look_so_have_none():
    usual = request([3, 5])
    assert head_of(usual) == usual[:-16]
    values = b"\x3a\x10" + usual[-16:]
    field = b"\xa2\x06" + varint(len(values)) + values
    assert parsed(usual + field) is not None and head_of(usual + field) is None
    assert head_of(usual[:-18] + values + b"\x1a\x02id") is None, "values must be the last of it"
    assert head_of(request([])) is None


# -- answers ------------------------------------------------------------------------------------------------------------------


class Context:
    """As gRPC's; `abort` raises what it is told."""

    def time_remaining(self):
        return None

    async def abort(self, code, words):
        raise BadInput(f"{code.name}: {words}")


@asynccontextmanager
async def served(folder, cards=3, tables=TABLES, **limits):
    torch.manual_seed(5)
    module = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("fp32", cache=0.0))
    thermocline.save(module, folder, incremental=True)
    repository = make_repository(folder, Cards(cards), Limits(**limits))
    await repository.load("tables")
    repository.served("tables").lane._short = math.inf  # however busy the machine is
    desk = Desk(repository, repository.limits, repository.metrics)
    over = OverGrpc(desk)
    try:
        yield SimpleNamespace(
            over=over, desk=desk, module=module, repository=repository, metrics=repository.metrics.of("tables")
        )
    finally:
        await repository.close()


async def ask(one, data):
    """The answer, by whichever way; and the one of the way that all requests can take."""
    try:
        found = await one.over.infer(data, Context())
    except BadInput as error:
        found = str(error)
    try:
        asked = read_request(data)
        answer = await one.desk.answer(asked)
        expected = write_response(asked.model, answer.version, asked.id, answer.outputs)
    except Exception as error:
        expected = one.desk.refuse("", error)
        expected = f"{expected.code}: {expected.words}"
    return found, expected


def test_requests_that_come_again_get_the_same_bytes_by_the_shorter_way(tmp_path):
    async def test():
        random_ = np.random.default_rng(3)
        async with served(tmp_path / "saved") as one:
            lookups = one.repository.served("tables").model.cards
            for round in range(4):
                for feature, rows, count in (("user", ROWS, 64), ("item", 53, 64), ("user", ROWS, 1), ("user", ROWS, 2053)):
                    data = request(random_.integers(0, rows, count), feature)
                    short = one.over._shortcuts.answer(data)
                    assert (short is not None) == (round > 0)
                    before = sum(card.lookups for card in lookups())
                    found, expected = await ask(one, data)
                    assert found == expected and short in (None, found)
                    assert sum(card.lookups for card in lookups()) == before + 2 * count, "each lookup is counted once"
            assert one.metrics.answered == 16 + 12 and one.metrics.batches[1] == 16 + 12 + 16

    asyncio.run(test())


def test_what_is_not_as_before_goes_the_long_way(tmp_path):
    async def test():
        async with served(tmp_path / "saved") as one:
            good, shortcuts = request([1, 2, 3]), one.over._shortcuts
            await ask(one, good)
            assert shortcuts.answer(good) is not None
            for ids in ([1, ROWS, 3], [-1, 0, 0], [1 << 62, 0, 0]):
                assert shortcuts.answer(request(ids)) is None
                found, expected = await ask(one, request(ids))
                assert found == expected and "INVALID_ARGUMENT: feature 'user' has ids 0 to 210" in found
            for other in (request([1, 2, 3], id="7"), request([1, 2, 3], "item"), request([1, 2, 3])[:-1] + b"\0\0"):
                assert shortcuts.answer(other) is None
            lane = one.repository.served("tables").lane
            lane._working = True
            assert shortcuts.answer(good) is None, "what waits goes first"
            lane._working = False
            one.repository.draining = True
            assert shortcuts.answer(good) is None
            assert "UNAVAILABLE" in (await ask(one, good))[0]

    asyncio.run(test())


def test_rows_are_of_the_version_that_is_served(tmp_path):
    async def test():
        async with served(tmp_path / "saved") as one:
            data = request([5, 6])
            first = (await ask(one, data))[0]
            one.module.set_rows("user", torch.tensor([6]), torch.full((1, 7), 2.5))
            thermocline.save(one.module, tmp_path / "saved", incremental=True)
            assert one.repository.served("tables").model.follow()  # before the repository knows of it
            for _ in range(3):
                found, expected = await ask(one, data)
                assert found == expected != first
            await one.repository.load("tables")
            assert (await ask(one, data))[0] == found
            response = schema.ModelInferResponse.FromString(found)
            assert response.model_version == "2"
            assert np.frombuffer(response.raw_output_contents[0], np.float32)[7:].tolist() == [2.5] * 7
            assert one.over._shortcuts.answer(data) == found
            one.repository.unload("tables")
            assert one.over._shortcuts.answer(data) is None

    asyncio.run(test())


def test_versions_that_are_not_served_any_more_leave_memory(tmp_path):
    async def test():
        async with served(tmp_path / "saved") as one:
            data, model = request([5, 6]), one.repository.served("tables").model
            await ask(one, data)
            assert one.over._shortcuts.answer(data) is not None
            old = weakref.ref(model.current)
            model.load(tmp_path / "saved")
            gc.collect()
            assert old() is None, "another was loaded"
            await one.repository.load("tables")
            await ask(one, data)
            assert one.over._shortcuts.answer(data) is not None
            old, lane = weakref.ref(model.current), weakref.ref(one.repository.served("tables").lane)
            del model
            one.repository.unload("tables")
            await asyncio.gather(*one.repository._closing)
            gc.collect()
            assert old() is None and lane() is None, "it was unloaded"

    asyncio.run(test())


def test_spoiled_requests_are_answered_as_on_the_long_way(tmp_path):
    async def test():
        draw = random.Random(4)
        async with served(tmp_path / "saved") as one:
            good = request(range(9))
            for _ in range(1500):
                data = good if draw.random() < 0.2 else spoiled_grpc(draw, good)
                found, expected = await ask(one, data)
                assert found == expected

    asyncio.run(test())


def test_heads_that_never_come_again_do_not_pile_up(tmp_path):
    async def test():
        async with served(tmp_path / "saved", cards=1) as one:
            routes = one.over._shortcuts._routes
            for count in range(1, LENGTHS + 60):
                await one.over.infer(request(np.zeros(count)), Context())
            for number in range(2 * OF_LENGTH):
                await one.over.infer(request(np.zeros(3), parameters={f"{number:03}": {"bool_param": True}}), Context())
            assert len(routes) <= LENGTHS and max(map(len, routes.values())) == OF_LENGTH
            long = schema.ModelInferRequest(model_name="tables", parameters={"x" * 600: {"bool_param": True}})
            await one.over.infer(long.SerializeToString() + request(np.zeros(3)), Context())
            assert all(len(route.head) < 600 for kept in routes.values() for route in kept)

    asyncio.run(test())


def test_many_features_with_names_of_one_length_are_known_side_by_side(tmp_path):
    names = [f"C{number}" for number in range(10, 27)]

    async def test():
        tables = [thermocline.Table(name, 11, 4) for name in names]
        async with served(tmp_path / "saved", cards=1, tables=tables) as one:
            for round in range(3):
                for name in names:
                    data = request([3, 5], name)
                    assert (one.over._shortcuts.answer(data) is not None) == (round > 0)
                    await one.over.infer(data, Context())

    asyncio.run(test())


def test_heads_are_read_only_where_something_can_be_learned(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(shortcut, "head_of", lambda data: read.append(data) or head_of(data))

    async def test():
        async with served(tmp_path / "saved", cards=1) as one:
            data, many = request([1, 2]), request(np.zeros(5000))
            await one.over.infer(data, Context())
            await one.over.infer(many, Context())
            assert read == [data], "so many rows are never written at once"
            model = one.repository.served("tables").model
            learn, answer = one.over._shortcuts.learn, await one.desk.answer(read_request(data))
            learn(data, answer)
            assert len(read) == 1, "it was known"
            model.load(tmp_path / "saved")
            learn(data, await one.desk.answer(read_request(data)))
            assert len(read) == 2, "it was known of tables that are not served any more"
            assert one.over._shortcuts.answer(data) is not None
        read.clear()
        async with served(tmp_path / "other", cards=1, wait=0.001) as one:
            await one.over.infer(data, Context())
            assert not read, "all requests wait"

    asyncio.run(asyncio.wait_for(test(), 60))


def test_nothing_is_learned_of_a_version_that_came_after_the_answer(tmp_path):
    async def test():
        async with served(tmp_path / "saved", cards=1) as one:
            data, named = request([5, 6]), request([5, 6], model_version="1")
            shortcuts, before = one.over._shortcuts, [await one.desk.answer(read_request(each)) for each in (data, named)]
            thermocline.save(one.module, tmp_path / "saved", incremental=True)
            assert one.repository.served("tables").model.follow()
            for each, answer in zip((data, named), before, strict=True):
                assert answer.version == "1"
                shortcuts.learn(each, answer)
                assert shortcuts.answer(each) is None
            late = before[1]._replace(version="2")  # it was found to name the version in use, and answered when it was not
            shortcuts.learn(named, late)
            assert shortcuts.answer(named) is None
            shortcuts.learn(data, await one.desk.answer(read_request(data)))
            assert shortcuts.answer(data) is not None

    asyncio.run(test())


def test_a_latency_budget_makes_all_requests_wait_for_others(tmp_path):
    async def test():
        async with served(tmp_path / "saved", wait=0.01) as one:
            for _ in range(3):
                found, expected = await ask(one, request([1, 2]))
                assert found == expected
            assert one.over._shortcuts.answer(request([1, 2])) is None

    asyncio.run(asyncio.wait_for(test(), 60))
