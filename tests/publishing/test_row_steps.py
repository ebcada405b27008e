"""Small steps in place of whole rows: what a byte budget sends, and that servers read the rows that the trainer means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import thermocline
from thermocline import formats as F
from thermocline.checkpoint.publishes.log import PublishLog
from thermocline.checkpoint.publishes.part import PublishedTable, PublishPart
from thermocline.checkpoint.publishes.row_delta import RowDelta, are_rows
from thermocline.checkpoint.publishes.row_steps import FORMATS, MOST_CODES, RowSteps
from thermocline.errors import BadPublish
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.publishing.backlog import CopiedRows, RowBacklog
from thermocline.rows.change_bitmap import UpdateCounts


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


@pytest.mark.parametrize("precision", ["int8", "fp32", "int4", {"int8": 0.5, "int4": 0.5}, {"fp32": 0.1, "int8": 0.9}], ids=str)
def test_steps_serve_the_rows_of_the_log_in_every_bit(make_trainer, serve, publish, monkeypatch, precision) -> None:
    server = serve(trainer := make_trainer(precision, cache=None if isinstance(precision, dict) else 0.1))
    publisher = publish(trainer, server, budget="1MiB")
    assert publisher.flush()
    sent = hold_up(publisher, monkeypatch)
    for _ in range(8):
        trainer.train(2)
        seal(publisher, 2000.0)
        assert publisher._links[0].wait_for(publisher.number, 30.0)
    assert any(part.steps for part in sent) == ("int4" not in precision), "the last of several precisions is served"
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
    assert server.publishes.base == publisher.number
    server.listen_again(secret.read_bytes())
    for _ in range(12):
        trainer.train(1)
        seal(publisher, 2000.0)
        assert publisher._links[0].wait_for(publisher.number, 30.0)
    assert server.serves(serve(trainer).rows())
    assert publisher.flush() and server.serves(trainer.expected())


def wait_live(publisher: thermocline.Publisher, live: bool) -> None:
    (link,) = publisher._links
    with link._changed:
        assert link._changed.wait_for(lambda: link._live is live and link._reloaded is live, 30.0)


def test_rows_that_changed_before_a_loaded_save_go_whole(make_trainer, serve, publish, monkeypatch, secret) -> None:
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server, budget="1MiB")
    for _ in range(3):
        trainer.train(2)
        seal(publisher, 2000.0)
    server._listener.close()
    trainer.train(2)
    seal(publisher, 2000.0)
    wait_live(publisher, False)
    trainer.train(2)
    thermocline.save(trainer.model, trainer.folder, incremental=True)  # after the publish that it contains, rows changed
    server.group.load(trainer.folder)
    server.listen_again(secret.read_bytes())
    wait_live(publisher, True)
    sent = hold_up(publisher, monkeypatch)
    for _ in range(8):
        trainer.train(1)
        seal(publisher, 2000.0)
        assert publisher._links[0].wait_for(publisher.number, 30.0)
    assert any(part.steps for part in sent) and server.serves(serve(trainer).rows())


def test_saves_of_the_same_publish_are_told_apart(make_trainer, serve, publish, monkeypatch) -> None:
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server, budget="1MiB")
    assert publisher._links[0].wait_for(0, 30.0)
    trainer.train(2)
    thermocline.save(trainer.model, trainer.folder, incremental=True)  # contains publish 0, as the first save does
    server.group.load(trainer.folder)
    sent = hold_up(publisher, monkeypatch)
    for _ in range(4):
        trainer.train(1)
        seal(publisher, 2000.0)
        assert publisher._links[0].wait_for(publisher.number, 30.0)
    assert any(part.steps for part in sent) and server.serves(serve(trainer).rows())


@pytest.mark.parametrize("budget", [None, "1MiB"])
def test_a_save_that_was_not_loaded_is_not_what_is_served(make_trainer, serve, publish, budget) -> None:
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server, budget=budget)
    trainer.train(2)
    seal(publisher, 2000.0)
    assert publisher._links[0].wait_for(publisher.number, 30.0)
    trainer.train(2)
    thermocline.save(trainer.model, trainer.folder, incremental=True)
    server.group.follow()  # publishes bring what changed
    publisher._end()  # or the next save does, as this trainer ends before
    again = publish(trainer, server)
    (link,) = again._links
    with link._changed:
        assert link._changed.wait_for(lambda: link._live, 30.0)
    assert server.serves(trainer.expected())


def test_steps_copied_before_a_server_loaded_a_save_are_not_sent(make_trainer, serve, publish) -> None:
    server = serve(trainer := make_trainer())
    (link,) = publish(trainer, server, budget="1MiB")._links
    link._reloaded = True
    assert link.reloaded(7) and not link.reloaded(8) and link._steps_from == 7


def test_few_bytes_do_not_stand_for_many_steps() -> None:
    draw = np.random.default_rng(2)
    few = some_steps(draw, 16, {"a": 3})
    most = (MOST_CODES - 256) // 25
    huge = RowSteps(
        [("a", most)], np.arange(most), np.zeros(most, np.int8), np.zeros((16, most), np.int8), few.directions_DD, 0.01
    )
    names = [replace(huge, tables=[(name, most)]) for name in "ab"]
    PublishPart.decode(encoded(huge))
    for steps, words in (
        (names, "codes of 2 tables"),
        ([few, few], "each table once"),
        ([replace(few, tables=[("a", 4), ("b", -1)])], "steps of 3 rows"),
        ([replace(few, step=1e39)], "by 1e[+]39"),
    ):
        with pytest.raises(BadPublish, match=words):
            PublishPart.decode(b"".join(bytes(each) for each in PublishPart(1, 2, 1, "", {}, steps=steps).encode()))


def test_row_numbers_that_wrap_around_are_not_ascending() -> None:
    most = (1 << 63) - 1
    assert not are_rows(np.array([0, most, -2, 5]), 6) and (np.diff([0, most, -2, 5]) > 0).all()
    assert are_rows(np.array([0, 3, 5]), 6) and not are_rows(np.array([0, 3, 6]), 6) and not are_rows(np.array([-1]), 6)


def test_wide_rows_are_sent_if_their_directions_do_not_fit() -> None:
    draw = np.random.default_rng(3)
    codes_KB, meta_KW = (each.numpy() for each in quantize_rows(torch.randn(40, 512), F.INT8))
    backlog = RowBacklog([PublishedTable("a", 40, 512, F.INT8)], [RowDelta(np.zeros(40, np.int64), codes_KB, meta_KW)])
    now = RowDelta(np.arange(40), draw.integers(0, 255, codes_KB.shape, np.uint8), meta_KW)
    chosen = backlog.choose([CopiedRows(0, np.arange(40), now, np.ones(40, np.uint8))], 16_000.0, True)
    assert not chosen.steps and chosen.whole["a"].bytes > 14_000, "a tenth of a MB of directions would never fit"


def test_rows_of_another_id_have_no_heat_of_the_one_before() -> None:
    codes_KB, meta_KW = (each.numpy() for each in quantize_rows(torch.randn(2, 8), F.INT8))
    backlog = RowBacklog(
        [PublishedTable("a", 2, 8, F.INT8)], [RowDelta(np.zeros(2, np.int64), codes_KB.copy(), meta_KW.copy())]
    )
    for counts in ([200, 200], [UpdateCounts.FIRST, 1]):
        copied = CopiedRows(0, np.arange(2), RowDelta(np.arange(2), codes_KB, meta_KW), np.array(counts, np.uint8))
        backlog.choose([copied], 1e9, True)
    assert backlog._heat_R.tolist() == [1, 201]


@pytest.mark.parametrize("precision", ["int8", "fp32", "fp16"])
def test_steps_that_continue_another_publish_are_refused(make_trainer, serve, publish, precision) -> None:
    server = serve(trainer := make_trainer(precision))
    publisher = publish(trainer, server)
    assert publisher.flush()
    save = server.publishes.save
    run, steps = publisher._run, some_steps(np.random.default_rng(1), 16, {"a": 3})
    steps = replace(steps, rows_K=np.array([1, 5, 1008]))
    (logged,) = next(PublishLog(trainer.folder, run).after(0))
    good = replace(logged, number=2, since=1, deltas={}, steps=[steps])
    before = server.rows()
    for part, loaded, reason in (
        (good, "another", "order"), (replace(good, since=0), save, "order"),
        (replace(good, steps=[replace(steps, rows_K=np.array([1, 5, 1009]))]), save, "damaged"),
        (replace(good, steps=[replace(steps, rows_K=np.array([5, 5, 8]))]), save, "damaged"),
        (replace(good, steps=[replace(steps, tables=[("b", 3)])]), save, "model"),
        (replace(good, steps=[replace(steps, tables=[("z", 3)])]), save, "model"),
        (replace(good, steps=[replace(steps, step=1e38)]), save, "values"),
    ):  # fmt: skip
        with pytest.raises(BadPublish) as caught:
            server.publishes.offer(part, 0.0, loaded)
        assert caught.value.reason == reason
    assert server.serves(before)
    assert server.publishes.offer(good, 0.0, save) == 2 and not server.serves(before)
