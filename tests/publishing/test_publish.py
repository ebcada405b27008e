"""Publishing from a trainer to a server over a real socket: what is served, and what happens to servers and trainers."""

from __future__ import annotations

import gc
import os
import threading
from unittest import mock

import numpy as np
import pytest
import torch

import thermocline
from support import has
from thermocline.checkpoint.publishes.log import PublishLog
from thermocline.errors import BadInput, BadPublish

LAYOUTS = {
    "int8": ("int8", {}),
    "int4, every row cached, Adam": ("int4", {"cache": 1.0, "optimizer": thermocline.Adam(lr=0.01)}),
    "bf16 without meta words": ("bf16", {"cache": 0.0}),
    "two precisions in one table": ({"fp32": 0.2, "int8": 0.8}, {"cache": None}),
    "int2 with near slots": ({"fp32": 0.05, "int8": 0.2, "int2": 0.75}, {"cache": None}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_served_rows_equal_a_checkpoint_of_the_moment_in_every_bit(make_trainer, serve, publish, name):
    precision, rows = LAYOUTS[name]
    server = serve(trainer := make_trainer(precision, **rows))
    publisher = publish(trainer, server)
    for steps in (1, 0, 5, 17):
        trainer.train(steps)
        assert publisher.flush() and server.serves(trainer.expected())
    assert server.group.current.overlay is None, "rows are in place"
    assert server.group.version.endswith(f"+{publisher.number}") and server.publishes.staleness().rows > 0


def test_a_step_publishes_only_when_it_is_time_and_marks_are_kept(make_trainer, serve, publish):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server, interval=1000.0)
    for _ in range(4):
        trainer.train(1)
        assert not publisher.step()
    assert publisher.number == 0 and publisher.flush() and server.serves(trainer.expected())


def test_dense_parameters_and_converted_models_are_published(make_trainer, serve, publish, tmp_path):
    trainer = make_trainer()
    trainer.model = torch.nn.ModuleDict({"tables": trainer.model, "top": torch.nn.Linear(3, 1)})
    server = serve(trainer)
    publisher = publish(trainer, server, dense=True)
    with torch.no_grad():
        trainer.model["top"].weight.fill_(7.0)
    assert publisher.flush()
    assert (server.group.current.dense["top.weight"] == 7).all()
    publisher.close()
    assert (serve(trainer).group.current.dense["top.weight"] == 7).all(), "and from the log"


def test_no_request_mixes_publishes_and_memory_stays_flat(make_trainer, serve, publish):
    server = serve(trainer := make_trainer("fp32", cache=0.0), shards=3)
    publisher, mixed, ended = publish(trainer, server), [], threading.Event()

    def fill(value: float) -> None:
        for name in ("a", "b"):
            rows = trainer.model.get_rows(name)
            trainer.model.set_rows(name, torch.arange(len(rows)), torch.full_like(rows, value))
        assert publisher.flush()

    def ask() -> None:
        while not ended.is_set():
            values = {float(v) for rows in server.rows().values() for v in rows.unique()}
            if len(values) != 1:
                mixed.append(values)

    fill(1.0)
    segments = server.group.current.segments
    readers = [threading.Thread(target=ask) for _ in range(2)]
    for reader in readers:
        reader.start()
    descriptors = []
    for value in range(2, 42):
        fill(value)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    ended.set()
    for reader in readers:
        reader.join()
    assert not mixed and server.group.current.segments is segments
    assert server.group.settle() and server.group.current.overlay is None
    gc.collect()
    assert max(descriptors[20:]) <= max(descriptors[:20]) + 1, "no segment of an old publish is left"


def test_a_version_that_is_held_keeps_its_rows_while_others_change(make_trainer, serve, publish):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server)
    assert publisher.flush()
    held = server.group.current
    before = [rows.clone() for rows in server.rows().values()]
    for _ in range(3):
        trainer.train()
        assert publisher.flush()
    assert server.group.current.overlay is not None, "the rows in place are still read"
    ids = {name: np.arange(rows.shape[0]) for name, rows in zip("ab", before, strict=True)}
    (found,) = server.group.infer([ids], held)
    assert all(torch.equal(torch.from_numpy(found[name]), rows) for name, rows in zip("ab", before, strict=True))
    assert server.serves(trainer.expected())
    del held
    assert server.group.settle() and server.serves(trainer.expected())


def test_requests_with_errors_do_not_hold_up_publishes(make_trainer, serve, publish):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server)
    gc.disable()
    try:
        bad = [{"a": np.array([10**9])}, {"a": np.array([0.5])}, {"a": np.arange(3)}]
        errors = server.group.infer(bad)
        trainer.train()
        assert publisher.flush() and server.group.current.overlay is None
        assert [isinstance(error, BadInput) for error in errors] == [True, True, False]
    finally:
        gc.enable()


def test_a_restarted_server_catches_up_from_checkpoint_and_log(make_trainer, serve, publish):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server)
    for _ in range(3):
        trainer.train()
        publisher.flush()
    thermocline.save(trainer.model, trainer.folder, incremental=True)
    trainer.train()
    publisher.flush()
    again = serve(trainer)
    assert again.serves(trainer.expected()) and again.publishes.number == publisher.number
    assert server.group.follow() is False, "the save has nothing new"
    assert server.serves(trainer.expected())


def test_a_server_that_was_gone_is_found_again_and_misses_nothing(make_trainer, serve, publish):
    first = serve(trainer := make_trainer())
    publisher = publish(trainer, first)
    assert publisher.flush()
    first.close()
    trainer.train()
    publisher.flush(1.0)
    trainer.train()
    assert not publisher.flush(1.0) and publisher.servers[0].state == "behind"
    second = serve(trainer, port=first.port)
    trainer.train()
    assert publisher.flush(60.0) and second.serves(trainer.expected())
    assert publisher.servers[0].state == "live"


def test_a_server_that_never_comes_does_not_stop_the_trainer(make_trainer, publish, secret):
    trainer = make_trainer()
    trainer_only = thermocline.publish(trainer.model, trainer.folder, to="127.0.0.1:9", secret_file=secret, interval=0.0)
    for _ in range(3):
        trainer.train()
        trainer_only.step()
    trainer_only.close(0.1)
    assert trainer_only.servers[0].state == "behind" and trainer.model.arena.unpublished is None


def test_a_resumed_trainer_is_a_new_run_and_servers_go_back_to_its_save(make_trainer, serve, publish):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server)
    thermocline.save(trainer.model, trainer.folder, incremental=True)
    saved = trainer.expected()
    trainer.train()
    assert publisher.flush() and not server.serves(saved)
    publisher._end()  # as a kill would
    trainer.model = thermocline.load(trainer.folder)
    publisher = publish(trainer, server)
    assert publisher.flush(60.0) and server.serves(saved)
    trainer.train()
    assert publisher.flush() and server.serves(trainer.expected())


def test_rolling_back_serves_an_earlier_publish_until_resume(make_trainer, serve, publish, monkeypatch):
    server = serve(trainer := make_trainer())
    publisher, rows = publish(trainer, server), {}
    for _ in range(4):
        trainer.train()
        publisher.flush()
        rows[publisher.number] = trainer.expected()
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(server.group, "_show", mock.Mock(side_effect=OSError("no memory")))
        server.publishes.roll_back(3)
    for number in (3, 1):
        server.publishes.roll_back(number)
        assert server.serves(rows[number])
    with pytest.raises(BadInput, check=has(parameter="to", value=4)):
        server.publishes.roll_back(4)
    trainer.train()
    assert not publisher.flush(0.5) and server.serves(rows[1]) and server.group.follow() is False
    assert publisher.servers[0].state == "refused"
    server.publishes.resume()
    assert publisher.flush(60.0) and server.serves(trainer.expected())


def test_rows_that_are_not_finite_are_not_sent(make_trainer, serve, publish):
    server = serve(trainer := make_trainer("fp32", cache=0.0))
    publisher, before = publish(trainer, server), server.rows()
    codes_RB, _, first, _, _ = trainer.model.arena.views(0)
    codes_RB[5, :4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)  # NaN
    trainer.model.arena.before_write(torch.tensor([first + 5, first + 9]))
    with pytest.raises(BadPublish, check=has(reason="values", table="a", row=5)):
        publisher.flush()
    assert server.serves(before) and not PublishLog(trainer.folder, publisher._run).files()


def test_a_second_publisher_is_refused_and_the_first_goes_on(make_trainer, serve, publish):
    server = serve(trainer := make_trainer())
    first = publish(trainer, server)
    both = torch.nn.ModuleList([thermocline.Embedding(7, 4), trainer.model])  # a part of it is published already
    for model in (trainer.model, both):
        with pytest.raises(BadInput) as refused:
            thermocline.publish(model, trainer.folder)
        assert refused.value.open
    trainer.train()
    assert first.flush() and server.serves(trainer.expected())
    first.close()
    trainer.model = both
    thermocline.publish(both, trainer.folder).close()


def test_an_address_and_an_interval_must_be_valid(make_trainer, secret):
    trainer = make_trainer()
    for wrong in ({"to": "localhost"}, {"to": "localhost:0"}, {"interval": -1.0}, {"budget": "10"}):
        with pytest.raises(BadInput):
            thermocline.publish(trainer.model, trainer.folder, secret_file=secret, **wrong)
    assert not trainer.folder.exists()
