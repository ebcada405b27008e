"""What a server refuses: bad rows, other models, publishes out of order, damaged files, strangers."""

from __future__ import annotations

import dataclasses
import random
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch

from support import has
from thermocline import formats as F
from thermocline.checkpoint.publishes.log import PublishLog
from thermocline.checkpoint.publishes.part import PublishPart, not_finite
from thermocline.checkpoint.publishes.row_delta import RowDelta
from thermocline.errors import BadPublish
from thermocline.ids.moved_ids import MovedIds
from thermocline.kernels import quantize_rows
from thermocline.serve.remote.session import AuthenticationFailed, accept, connect


@pytest.fixture
def published(make_trainer, serve, publish):
    """A server after two publishes, the publisher, and the last part of its log."""
    server = serve(trainer := make_trainer("int8", cache=0.0))
    publisher = publish(trainer, server)
    for _ in range(2):
        trainer.train()
        assert publisher.flush()
    (_, [last]) = PublishLog(trainer.folder, publisher._run).after(0)
    return server, publisher, dataclasses.replace(last, number=3, since=2)


def changed(part: PublishPart, **fields: object) -> PublishPart:
    delta = part.deltas["a"]
    return dataclasses.replace(part, deltas={**part.deltas, "a": dataclasses.replace(delta, **fields)})


def test_bad_publishes_are_refused_and_change_nothing(published):
    server, _, part = published
    before, delta = server.rows(), part.deltas["a"]
    nan = delta.meta_KW.copy()
    nan[3] = np.float32(np.nan).view(np.int32)
    pointer = delta.meta_KW.copy()
    pointer[0] |= np.int32(-(2**31))
    bad = {
        "values": [changed(part, meta_KW=nan), changed(part, meta_KW=pointer)],
        "model": [
            dataclasses.replace(part, model="other"),
            dataclasses.replace(part, deltas={"c": delta}),
            changed(part, codes_KB=delta.codes_KB[:, :-1]),
        ],
        "damaged": [changed(part, rows_K=delta.rows_K[::-1]), changed(part, rows_K=delta.rows_K + 10**6)],
        "run": [dataclasses.replace(part, run=part.run + 1)],
        "replay": [dataclasses.replace(part, number=2, since=1)],
        "order": [dataclasses.replace(part, number=5, since=4)],
    }
    for reason, parts in bad.items():
        for each in parts:
            with pytest.raises(BadPublish, check=has(reason=reason)):
                server.publishes.offer(each, 0.0)
    assert server.serves(before) and server.publishes.number == 2 and server.publishes.refused == 10
    assert server.publishes.offer(part, 0.0) == 3


def test_parts_of_two_ranks_are_one_publish(published):
    server, _, part = published
    rows, half = part.deltas["a"], len(part.deltas["a"].rows_K) // 2
    zeros = dataclasses.replace(rows, codes_KB=np.zeros_like(rows.codes_KB))
    first, second = (
        RowDelta(*(getattr(zeros, name)[cut] for name in ("rows_K", "codes_KB", "meta_KW")))
        for cut in (slice(half), slice(half, None))
    )
    parts = [dataclasses.replace(part, rank=rank, ranks=2, deltas={"a": d}) for rank, d in enumerate((first, second))]
    before, found = server.rows(), []
    thread = threading.Thread(target=lambda: found.append(server.publishes.offer(parts[1], 0.0)))
    thread.start()
    while not server.publishes._parts:
        pass
    assert server.serves(before), "half a publish is not served"
    assert server.publishes.offer(parts[0], 0.0) == 3
    thread.join()
    assert found == [3] and not server.rows()["a"][torch.from_numpy(rows.rows_K)].any()


def test_a_damaged_log_is_served_up_to_the_damage(published, make_trainer, serve):
    server, publisher, part = published
    log = PublishLog(server.group.folder, publisher._run)
    log.append(part)
    path = log.files()[-1].path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = server.rows()
    server.group.load(server.group.folder)
    assert server.publishes.number == 2 and server.serves(before)


def test_parts_survive_encoding_and_changed_bytes_are_refused():
    draw = random.Random(3)
    delta = RowDelta(np.array([2, 5, 9]), np.arange(21, dtype=np.uint8).reshape(3, 7), np.ones((3, 1), np.int32))
    dense = {"top": torch.arange(5.0), "small": torch.tensor([1.5], dtype=torch.bfloat16), "none": torch.zeros(0, 3)}
    moved = MovedIds(torch.tensor([2, 9]), torch.tensor([-7, 1 << 60]), torch.tensor([True, False]))
    part = PublishPart(7, 12, 11, "model", {"a": delta}, dense, {"a": moved}, 1, 3, 5.5, 40, ((2.0, 0.25),))
    data = b"".join(bytes(piece) for piece in part.encode())
    again = PublishPart.decode(data)
    for name in ("rows_K", "codes_KB", "meta_KW"):
        assert np.array_equal(getattr(again.deltas["a"], name), getattr(delta, name))
    assert all(torch.equal(again.dense[name], tensor) for name, tensor in dense.items())
    assert all(map(torch.equal, again.ids["a"], moved))
    others = {"deltas": {}, "dense": {}, "ids": {}}
    assert dataclasses.replace(again, **others) == dataclasses.replace(part, **others)
    for _ in range(300):
        spoiled = bytearray(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)
        for _ in range(draw.choice((0, 1, 3))):
            if spoiled:
                spoiled[draw.randrange(min(len(spoiled), 400))] ^= 1 << draw.randrange(8)
        with suppress(BadPublish):
            PublishPart.decode(spoiled)


@pytest.mark.parametrize("format", range(len(F.NAMES)), ids=F.NAMES)
def test_rows_with_nan_or_inf_are_found_in_every_format(format):
    codes_KB, meta_KW = (each.numpy().copy() for each in quantize_rows(torch.randn(9, 8), format))
    assert not not_finite(format, codes_KB, meta_KW).any()
    bad = {F.FP32: [0, 0, 128, 127], F.FP16: [0, 124], F.BF16: [128, 127], F.FP8: [127]}.get(format)
    if bad is not None:
        codes_KB[4, : len(bad)] = bad
    else:
        wide = format in (F.INT8, F.INT8_AFFINE)
        meta_KW.view(np.uint32)[4, -1] = 0x7FC00000 if wide else 0x7F807F80 if format in (F.INT4, F.INT2) else 0x00007C00
    assert not_finite(format, codes_KB, meta_KW).nonzero()[0].tolist() == [4]


SECRET = b"0123456789abcdef"


def pair(client: bytes = SECRET, server: bytes = SECRET):
    """Two sides of a connection, or the error of each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = []

        def answer() -> None:
            try:
                found.append(accept(listener.accept()[0], server, None, 5.0))
            except EOFError as error:
                found.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            mine = connect(listener.getsockname(), client, None, 5.0)
        except EOFError as error:
            mine = error
        thread.join()
    return mine, found[0]


def test_both_sides_must_have_the_secret():
    client, server = pair()
    client.send({"do": "x"}, [b"abc", memoryview(b"de")])
    assert server.receive(5) == ({"do": "x"}, b"abcde")
    server.send({"ok": 1})
    assert client.receive(0)[0] == {"ok": 1}
    assert all(isinstance(each, EOFError) for each in pair(client=b"another secret 1"))
    for each in (client, server):
        each.close()


class Wire:
    """Records what is sent."""

    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(bytes(data))


@pytest.mark.parametrize("what", ["a bit", "a repetition", "its own direction", "too large"])
def test_changed_and_repeated_messages_end_a_session(what):
    client, server = pair()
    sent: list[bytes] = []
    wire, client._connection = client._connection, Wire(sent)
    client.send({"do": "x"}, [b"abc"])
    data = b"".join(sent)
    if what == "a bit":
        data = data[:-36] + bytes([data[-36] ^ 1]) + data[-35:]
    wire.sendall(data)
    if what == "a repetition":
        assert server.receive(8) == ({"do": "x"}, b"abc")
        wire.sendall(data)
    receiver = server
    if what == "its own direction":
        server.receive(8)
        server._connection.sendall(data)
        client._connection, receiver = wire, client
    with pytest.raises(AuthenticationFailed):
        receiver.receive(2 if what == "too large" else 8)
    wire.close()
    server.close()
