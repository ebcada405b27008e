"""The fast path: the same bytes as the general path, only for requests that it can answer, in few calls."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import sys
import weakref
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import thermocline
from benchmarks.chaos.fuzz import spoiled_grpc
from support import drawn_calls
from thermocline.errors import BadInput
from thermocline.kernels.cpu.compile import Kernel
from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import read_request, write_response
from thermocline.serve.server.config import ServerConfig, ServerLimits
from thermocline.serve.server.fast_path import MAX_VALUES, answer
from thermocline.serve.server.grpc_server import GrpcService
from thermocline.serve.server.inference_service import InferenceService
from thermocline.serve.server.model_loader import ShardConfig, make_repository

ROWS, MAX_CALLS = 211, 8
TABLES = [thermocline.Table("user", ROWS, 7), thermocline.Table("item", 53, 12)]
PACKAGE = Path(thermocline.__file__).parent


def encode(ids, feature="user", **fields):
    message = schema.ModelInferRequest(model_name="tables", raw_input_contents=[np.asarray(ids, np.int64).tobytes()], **fields)
    message.inputs.add(name=feature, datatype="INT64", shape=[len(ids)])
    return message.SerializeToString()


class Context:
    """The context of a gRPC call with one message; `abort` raises its code and message."""

    def __init__(self, data):
        self.data = data

    async def read(self):
        return self.data

    def add_done_callback(self, callback):
        pass

    def time_remaining(self):
        return None

    async def abort(self, code, message):
        raise BadInput(f"{code.name}: {message}")


@asynccontextmanager
async def served(folder, shards=3, tables=TABLES, mode="sum", precision="fp32", **limits):
    torch.manual_seed(5)
    module = thermocline.EmbeddingCollection(tables, mode=mode, rows=thermocline.RowConfig(precision, cache=0.0))
    thermocline.save(module, folder, incremental=True)
    repository = make_repository(folder, ShardConfig(shards), ServerLimits(**limits))
    await repository.load("tables")
    repository.served("tables").batcher._max_loop_seconds = math.inf  # on a machine of any speed
    service = InferenceService(repository, ServerConfig(limits=repository.limits))
    try:
        yield SimpleNamespace(
            grpc=GrpcService(service),
            service=service,
            module=module,
            repository=repository,
            metrics=repository.metrics.of("tables"),
        )
    finally:
        await repository.close()


def fast(one, data):
    """The response of the fast path, or None."""
    return answer(one.service, data, perf_counter())


async def both(one, data):
    """The response or error of the server, and that of the general path."""
    try:
        found = await one.grpc.infer(None, Context(data))
    except BadInput as error:
        found = str(error)
    try:
        request = read_request(data)
        result = await one.service.infer(request, one.service.find(request), 0.0, lambda size: None)
        expected = write_response(request.model, result.version, request.id, result.outputs)
    except Exception as error:
        status = one.service.fail("", error)
        return found, f"{status.code}: {status.message}"
    return parsed(found), parsed(expected)


def parsed(data):
    return schema.ModelInferResponse.FromString(data) if isinstance(data, bytes) else data


def test_responses_equal_those_of_the_general_path(tmp_path):
    async def test():
        draw = np.random.default_rng(3)
        async with served(tmp_path / "saved") as one:
            shards = one.repository.served("tables").model.shards
            for feature, rows, count in (("user", ROWS, 64), ("item", 53, 64), ("user", ROWS, 1), ("user", ROWS, MAX_VALUES)):
                for fields in ({}, {"id": "a-42"}, {"model_version": "1"}):
                    data = encode(draw.integers(0, rows, count), feature, **fields)
                    before = sum(shard.lookups for shard in shards()), one.metrics.answered, one.metrics.ids
                    response = fast(one, data)
                    after = sum(shard.lookups for shard in shards()), one.metrics.answered, one.metrics.ids
                    assert [new - old for new, old in zip(after, before, strict=True)] == [count, 1, count]
                    found, expected = await both(one, data)
                    assert found == expected == parsed(response)

    asyncio.run(test())


def with_second_input(data):
    message = schema.ModelInferRequest.FromString(data)
    message.inputs.add(name="item", datatype="INT64", shape=[1])
    message.raw_input_contents.append(np.zeros(1, np.int64).tobytes())
    return message.SerializeToString()


def with_output(data, name):
    message = schema.ModelInferRequest.FromString(data)
    message.outputs.add(name=name)
    return message.SerializeToString()


def test_other_requests_take_the_general_path(tmp_path):
    async def test():
        async with served(tmp_path / "saved") as one:
            good = encode([1, 2, 3])
            assert fast(one, good) is not None and fast(one, with_output(good, "user")) is not None
            others = [encode([1, ROWS]), encode([-1]), encode([]), encode([0] * (MAX_VALUES + 1)), encode([1], "chairs")]
            for data in (*others, with_output(good, "item"), with_output(with_second_input(good), "user")):
                assert fast(one, data) is None
                found, expected = await both(one, data)
                assert found == expected
            batcher = one.repository.served("tables").batcher
            batcher._executing = True
            assert fast(one, good) is None, "queued requests come first"
            batcher._executing = False
            one.repository.draining = True
            assert (await both(one, good))[0].startswith("UNAVAILABLE")

    asyncio.run(test())


MAPPED = [
    thermocline.Table("shop", 61, 5, ids=thermocline.IdMap.hashed(61)),
    thermocline.Table(
        "user", ROWS, 7, ["user", "friend"], ids={"friend": thermocline.IdMap.pruned(range(0, 2 * ROWS - 6, 2), fallback=3)}
    ),
    thermocline.Table("item", 53, 12),
]


def drawn_request(draw, names, limits):
    """A request of any features, in any order, with or without offsets and weights; some are invalid."""
    message = schema.ModelInferRequest(model_name="tables", id=draw.choice(["", "", "a-42", "é"]))
    message.model_version = draw.choice(["", "", "", "1", "7"])
    asked = draw.sample(names, draw.randint(1, len(names)))
    inputs, bad = {}, draw.random() < 0.2
    for name in asked:
        count = draw.choice([0, 1, 1, 2, 9, 63])
        inputs[name] = np.array([draw.randrange(limits[name] + bad) for _ in range(count)], np.int64)
        if draw.random() < 0.5:
            ends = sorted(draw.randint(0, count) for _ in range(draw.choice([0, 1, 2, 7])))
            inputs[name + ".offsets"] = np.array([0, *ends] if draw.random() < 0.95 else ends, np.int64)
            if draw.random() < 0.5:
                weights = np.array([draw.choice([0.5, -2.0, 1e-3]) for _ in range(count)], np.float32)
                inputs[name + ".weights"] = weights if draw.random() < 0.9 else weights * np.float32(np.inf)
    order = list(inputs)
    if draw.random() < 0.3:
        draw.shuffle(order)
    for name in order:
        tensor = message.inputs.add(
            name=name, datatype="FP32" if name.endswith("weights") else "INT64", shape=inputs[name].shape
        )
        message.raw_input_contents.append(inputs[name].tobytes())
        if draw.random() < 0.01:
            tensor.parameters["x"].bool_param = True
    for name in draw.choice([(), (), asked, asked[:1], asked[::-1]]):
        message.outputs.add(name=name)
    return message.SerializeToString()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_drawn_requests_are_answered_as_by_the_general_path(tmp_path, mode):
    draw, names = random.Random(mode), ["shop", "user", "friend", "item"]
    limits = {"shop": 1 << 62, "user": ROWS, "friend": 1 << 62, "item": 53}

    async def test():
        async with served(tmp_path / "saved", tables=MAPPED, mode=mode, precision="int8") as one:
            answered = 0
            for _ in range(400):
                data = drawn_request(draw, names, limits)
                answered += fast(one, data) is not None
                found, expected = await both(one, data)
                assert found == expected
            assert answered > 20

    asyncio.run(test())


def test_every_cut_and_flipped_bit_of_a_request_is_answered_as_by_the_general_path(tmp_path):
    async def test():
        async with served(tmp_path / "saved") as one:
            message = schema.ModelInferRequest.FromString(with_second_input(encode([1, 2], id="a", model_version="1")))
            for name in ("user", "item"):
                message.outputs.add(name=name)
            good = message.SerializeToString()
            assert fast(one, good) is not None
            flipped = [good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :] for at in range(len(good)) for bit in range(8)]
            for data in (*(good[:at] for at in range(len(good))), *flipped):
                if (response := fast(one, data)) is not None:
                    assert parsed(response) == (await both(one, data))[1], data

    asyncio.run(test())


@pytest.mark.parametrize("limits", [{"wait": 0.01}, {"ids": 1}])
def test_a_queue_delay_and_the_limit_of_ids_hold(tmp_path, limits):
    async def test():
        async with served(tmp_path / "saved", **limits) as one:
            assert fast(one, encode([1, 2])) is None
            found, expected = await both(one, encode([1, 2]))
            assert found == expected

    asyncio.run(asyncio.wait_for(test(), 60))


def test_rows_come_from_the_version_in_use(tmp_path):
    async def test():
        async with served(tmp_path / "saved") as one:
            data = encode([5, 6])
            first = fast(one, data)
            one.module.set_rows("user", torch.tensor([6]), torch.full((1, 7), 2.5))
            thermocline.save(one.module, tmp_path / "saved", incremental=True)
            assert one.repository.served("tables").model.follow()  # before the repository knows
            response = parsed(fast(one, data))
            assert response.model_version == "2" and response != parsed(first)
            assert np.frombuffer(response.raw_output_contents[0], np.float32)[7:].tolist() == [2.5] * 7
            await one.repository.load("tables")
            assert parsed(fast(one, data)) == response
            one.repository.unload("tables")
            assert (await both(one, data))[0].startswith("NOT_FOUND")

    asyncio.run(test())


def test_replaced_versions_are_freed(tmp_path):
    async def test():
        async with served(tmp_path / "saved") as one:
            data, model = encode([5, 6]), one.repository.served("tables").model
            assert fast(one, data) is not None
            old = weakref.ref(model.current)
            model.load(tmp_path / "saved")
            gc.collect()
            assert old() is None
            assert fast(one, data) is not None
            old, batcher = weakref.ref(model.current), weakref.ref(one.repository.served("tables").batcher)
            del model
            one.repository.unload("tables")
            await asyncio.gather(*one.repository._closing)
            gc.collect()
            assert old() is None and batcher() is None

    asyncio.run(test())


def test_corrupted_requests_are_answered_as_by_the_general_path(tmp_path):
    async def test():
        draw = random.Random(4)
        async with served(tmp_path / "saved") as one:
            good = encode(range(9))
            for _ in range(500):
                found, expected = await both(one, good if draw.random() < 0.2 else spoiled_grpc(draw, good))
                assert found == expected

    asyncio.run(test())


def calls_to_kernel(infer, data):
    """`file:function` of every call from the gRPC handler to the first compiled kernel, and the response."""
    chains = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code is Kernel.__call__.__code__ and not chains:
            chain = []
            while frame is not None and frame.f_code is not GrpcService.infer.__code__:
                frame = frame.f_back
                chain.append(frame)
            files = [(Path(each.f_code.co_filename), each.f_code.co_name) for each in reversed(chain)]
            chains.append([f"{file.relative_to(PACKAGE)}:{name}" for file, name in files])

    call = infer(None, Context(data))
    sys.setprofile(profile)
    try:
        with pytest.raises(StopIteration) as done:
            call.send(None)
    finally:
        sys.setprofile(None)
    return chains[0], done.value.value


@pytest.mark.parametrize("path, feature", [("general", None), ("fast", "user")])
def test_few_calls_lead_from_the_grpc_handler_to_the_kernel(tmp_path, path, feature):
    async def test():
        async with served(tmp_path / "saved") as one:
            data = encode([1, 2, 3]) if feature else b"\x1a\x01x" + with_second_input(encode([1, 2, 3]))  # an id first
            await one.grpc.infer(None, Context(data))  # kernels are loaded
            calls, response = calls_to_kernel(one.grpc.infer, data)
            assert len(calls) <= MAX_CALLS, calls
            assert calls == drawn_calls("served_lookup", path)
            assert parsed(response) == (await both(one, data))[1]

    asyncio.run(test())
