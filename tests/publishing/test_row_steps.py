"""Small steps in place of whole rows: what a byte budget sends, and that servers read the rows that the trainer means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import thermocline
from thermocline import formats as F
from thermocline.checkpoint.publishes.log import PublishLog
from thermocline.checkpoint.publishes.part import PublishPart
from thermocline.checkpoint.publishes.row_delta import RowDelta
from thermocline.checkpoint.publishes.row_steps import FORMATS, RowSteps
from thermocline.errors import BadPublish
from thermocline.kernels import dequantize_rows, quantize_rows


def some_steps(draw: np.random.Generator, dim: int, rows: dict[str, int]) -> RowSteps:
    count = sum(rows.values())
    numbers = [np.sort(draw.choice(5000, each, replace=False)) for each in rows.values()]
    codes, directions = draw.integers(-9, 10, (dim, count)), draw.integers(-127, 128, (dim, dim))
    arrays = (np.concatenate(numbers), draw.integers(-8, 3, count).astype(np.int8), codes.astype(np.int8))
    return RowSteps(list(rows.items()), *arrays, directions.astype(np.int8), 0.01)


def encoded(steps: RowSteps) -> bytearray:
    return bytearray(b"".join(bytes(each) for each in PublishPart(1, 2, 1, "", {}, steps=[steps]).encode()))


@pytest.mark.parametrize("format", FORMATS, ids=[F.NAMES[each] for each in FORMATS])
def test_steps_survive_encoding_and_move_rows(format: int) -> None:
    draw = np.random.default_rng(format)
    for dim, rows in ((1, {"a": 3}), (16, {"a": 63, "b": 0, "c": 1}), (33, {"c": 200})):
        steps = some_steps(draw, dim, rows)
        (again,) = PublishPart.decode(encoded(steps)).steps
        assert list(map(list, again.tables)) == list(map(list, steps.tables)) and np.array_equal(again.rows_K, steps.rows_K)
        before = {}
        for name, part in steps.parts():
            values = torch.tensor(draw.standard_normal((rows[name] + 1, dim)), dtype=torch.float32)
            codes_KB, meta_KW = (each.numpy()[1:] for each in quantize_rows(values, format))
            before[name] = RowDelta(steps.rows_K[part], codes_KB, meta_KW)
        after = again.applied(before, dict.fromkeys(rows, format))
        size_K = steps.step / 127 * 2.0 ** steps.exponents_K.astype(float)
        assert len(after["a" if dim < 33 else "c"].rows_K) and all(len(after[name].codes_KB) == rows[name] for name in rows)
        for name, part in steps.parts():
            if not rows[name]:
                continue
            old_KD, new_KD = (
                dequantize_rows(torch.from_numpy(each.codes_KB), torch.from_numpy(each.meta_KW), format, dim).double().numpy()
                for each in (before[name], after[name])
            )
            expected_KD = old_KD + (steps.codes_DK[:, part].T * size_K[part, None]) @ steps.directions_DD
            largest = np.abs(expected_KD).max(initial=1.0)
            np.testing.assert_allclose(new_KD, expected_KD, atol=largest * (0.07 if format == F.FP8 else 0.01))


def test_damaged_steps_are_refused() -> None:
    draw = np.random.default_rng(0)
    good = encoded(some_steps(draw, 16, {"a": 63, "b": 5}))
    refused = 0
    for _ in range(400):
        bad = bytearray(good)
        bad[int(draw.integers(8, len(bad)))] ^= 1 << int(draw.integers(8))
        try:
            PublishPart.decode(bad)
        except BadPublish:
            refused += 1
    assert refused > 300, "bz2 has checksums"


def seal(publisher: thermocline.Publisher, available: float) -> None:
    publisher._seal(0.0, available)
    publisher._wait_idle(float("inf"))
    assert publisher._check_logged()


def hold_up(publisher: thermocline.Publisher, monkeypatch: pytest.MonkeyPatch) -> list[PublishPart]:
    """What the links of a publisher are given to send."""
    sent = []
    for link in publisher._links:
        offer = link.offer
        monkeypatch.setattr(link, "offer", lambda part, small, offer=offer: (sent.append(small), offer(part, small)))
    return sent


@pytest.mark.parametrize("precision", ["int8", "fp32", "int4", {"int8": 0.5, "int4": 0.5}], ids=str)
def test_steps_serve_the_rows_of_the_log_in_every_bit(make_trainer, serve, publish, monkeypatch, precision) -> None:
    server = serve(trainer := make_trainer(precision, cache=None if isinstance(precision, dict) else 0.1))
    publisher = publish(trainer, server, budget="1MiB")
    assert publisher.flush()
    sent = hold_up(publisher, monkeypatch)
    for _ in range(8):
        trainer.train(2)
        seal(publisher, 2000.0)
        assert publisher._links[0].wait_for(publisher.number, 30.0)
    if isinstance(precision, str):
        assert any(part.steps for part in sent) == (precision != "int4")
    assert all(part.size <= 3000 for part in sent)
    assert server.serves(serve(trainer).rows()), "a server that starts now reads the log"
    assert not server.serves(trainer.expected())
    assert publisher.flush() and server.serves(trainer.expected())


def test_a_server_that_loads_a_save_gets_waiting_rows_whole(make_trainer, serve, publish, secret) -> None:
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server, budget="1MiB")
    for _ in range(3):
        trainer.train(2)
        seal(publisher, 300.0)
    server._listener.close()
    thermocline.save(trainer.model, trainer.folder, incremental=True)  # it has rows that no server was sent
    server.group.load(trainer.folder)
    assert server.publishes.loaded_base == publisher.number
    server.listen_again(secret.read_bytes())
    for _ in range(12):
        trainer.train(1)
        seal(publisher, 2000.0)
        assert publisher._links[0].wait_for(publisher.number, 30.0)
    assert server.serves(serve(trainer).rows())
    assert publisher.flush() and server.serves(trainer.expected())


def test_steps_that_continue_another_publish_are_refused(make_trainer, serve, publish) -> None:
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server)
    assert publisher.flush()
    run, steps = publisher._run, some_steps(np.random.default_rng(1), 16, {"a": 3})
    steps = replace(steps, rows_K=np.array([1, 5, 1008]))
    (logged,) = next(PublishLog(trainer.folder, run).after(0))
    good = replace(logged, number=2, since=1, deltas={}, steps=[steps])
    before = server.rows()
    for part, loaded, reason in (
        (good, 1, "order"), (replace(good, since=0), 0, "order"),
        (replace(good, steps=[replace(steps, rows_K=np.array([1, 5, 1009]))]), 0, "damaged"),
        (replace(good, steps=[replace(steps, rows_K=np.array([5, 5, 8]))]), 0, "damaged"),
        (replace(good, steps=[replace(steps, tables=[("b", 3)])]), 0, "model"),
        (replace(good, steps=[replace(steps, tables=[("z", 3)])]), 0, "model"),
        (replace(good, steps=[replace(steps, step=1e38)]), 0, "values"),
    ):  # fmt: skip
        with pytest.raises(BadPublish) as caught:
            server.publishes.offer(part, 0.0, loaded)
        assert caught.value.reason == reason
    assert server.serves(before)
    assert server.publishes.offer(good, 0.0, 0) == 2 and not server.serves(before)
