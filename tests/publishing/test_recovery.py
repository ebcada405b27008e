"""Publishes that fail on the way: nothing that changed is lost, and a server finds back whatever it missed."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading

import pytest
import torch

import thermocline
from support import has
from thermocline.checkpoint.publishes.log import PublishLog
from thermocline.errors import BadPublish, ThermoclineError
from thermocline.publishing import publisher as publishing


def fail_once(monkeypatch, error):
    """The next write to a log fails."""
    append, left = PublishLog.append, [error]

    def fail(self, part):
        if left:
            raise left.pop()
        return append(self, part)

    monkeypatch.setattr(PublishLog, "append", fail)


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_rows_of_a_publish_that_could_not_be_written_come_with_the_next(make_trainer, serve, publish, monkeypatch, budget):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server, budget=budget)
    assert publisher.flush()
    trainer.train()
    fail_once(monkeypatch, ThermoclineError("no space is left"))
    with pytest.raises(ThermoclineError):
        publisher.flush()
    trainer.train(1)
    assert publisher.flush() and server.serves(trainer.expected())
    assert serve(trainer).serves(trainer.expected()), "from the log"


def test_a_failed_publish_is_noticed_by_step(make_trainer, serve, publish, monkeypatch):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server)
    fail_once(monkeypatch, ThermoclineError("no space is left"))
    assert publisher.step()
    while publisher._error is None:
        os.sched_yield()
    assert not publisher._is_idle()
    with pytest.raises(ThermoclineError):
        publisher.step()
    trainer.train()
    assert publisher.flush() and server.serves(trainer.expected())


def test_a_row_that_was_not_finite_is_published_once_it_is(make_trainer, serve, publish):
    server = serve(trainer := make_trainer("fp32", cache=0.0))
    publisher = publish(trainer, server)
    trainer.train()
    codes_RB, _, first, _, _ = trainer.model.arena.views(0)
    codes_RB[5, :4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)  # NaN
    trainer.model.arena.before_write(torch.tensor([first + 5]))
    for _ in range(2):
        with pytest.raises(BadPublish, check=has(reason="values", table="a", row=5)):
            publisher.flush()
    trainer.model.set_rows("a", torch.tensor([5]), torch.ones(1, 16))
    assert publisher.flush() and server.serves(trainer.expected())


def test_a_server_that_was_paused_while_saves_replaced_the_log_catches_up(make_trainer, serve, publish, secret):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server)
    trainer.train()
    assert publisher.flush()
    server._listener.close()  # as a broken network would: the server lives on
    for _ in range(2):
        trainer.train()
        publisher.flush(0.2)
        thermocline.save(trainer.model, trainer.folder, incremental=True)
    publisher.flush(0.2)
    assert PublishLog(trainer.folder, publisher._run).files()[0].since > server.publishes.number, "the log begins later"
    server.listen_again(secret.read_bytes())
    trainer.train()
    assert publisher.flush(60.0) and server.serves(trainer.expected())


def test_a_damaged_log_is_left_behind_with_the_next_save(make_trainer, serve, publish, secret):
    server = serve(trainer := make_trainer())
    publisher = publish(trainer, server)
    assert publisher.flush()
    server._listener.close()
    trainer.train()
    publisher.flush(0.2)
    path = PublishLog(trainer.folder, publisher._run).files()[-1].path
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    server.listen_again(secret.read_bytes())
    assert not publisher.flush(1.0) and publisher.servers[0].state != "live"
    thermocline.save(trainer.model, trainer.folder, incremental=True)
    trainer.train()
    assert publisher.flush(60.0) and server.serves(trainer.expected())


def test_a_server_with_nonsense_for_answers_does_not_end_the_link(make_trainer, publish, monkeypatch):
    trainer, asked = make_trainer(), threading.Semaphore(0)

    class Nonsense:
        def settimeout(self, seconds):
            pass

        def send(self, message, pieces=()):
            asked.release()

        def receive(self, limit):
            return {"unexpected": json.dumps(struct.pack("<I", 1).hex())}, bytearray()

        def close(self):
            pass

    monkeypatch.setattr("thermocline.publishing.server_link.connect", lambda *_: Nonsense())
    publisher = thermocline.publish(trainer.model, trainer.folder, interval=0.0)
    target = publishing.LinkTarget("localhost", 9, "tables", 5.0)
    link = publishing.ServerLink(target, 1, "", "", b"", None)
    assert all(asked.acquire(timeout=30.0) for _ in range(2)), "it asks again"
    assert link.has(10**9) and link.state.state == "behind"
    link.close()
    publisher.close()


def test_rows_that_loading_replaced_are_published_and_saved(make_trainer, serve, publish, tmp_path):
    server = serve(trainer := make_trainer())
    state, early = {name: each.clone() for name, each in trainer.model.state_dict().items()}, trainer.expected()
    thermocline.save(trainer.model, tmp_path / "early")
    publisher = publish(trainer, server)
    for load in (
        lambda: thermocline.load_into(trainer.model, tmp_path / "early"),
        lambda: trainer.model.load_state_dict(state),
    ):
        trainer.train()
        thermocline.save(trainer.model, trainer.folder, incremental=True)
        assert publisher.flush() and not server.serves(early)
        load()
        assert publisher.flush() and server.serves(early)
        thermocline.save(trainer.model, trainer.folder, incremental=True)
        assert serve(trainer).serves(early), "an incremental save after loading has all rows"


def test_a_budget_is_shared_by_the_rows_of_all_modules(make_trainer, serve, publish):
    trainer = make_trainer()
    tables = trainer.model
    trainer.model = torch.nn.ModuleList([tables, thermocline.Embedding(501, 4, rows=thermocline.RowConfig("int8", cache=0.0))])
    server = serve(trainer)
    publisher = publish(trainer, server, budget="1MiB")
    tables(torch.tensor([[3, 4]])).values().sum().backward()
    trainer.model[1](torch.tensor([7, 8, 9])).sum().backward()
    publisher._seal(0.0, 30.0)  # one row of 28 bytes, of the first module
    publisher._wait_idle(float("inf"))
    (part,) = next(PublishLog(trainer.folder, publisher._run).after(0))
    assert sum(len(delta.rows_K) for delta in part.deltas.values()) <= 2
    assert sum(share for _, share in part.waiting) > 0.5, "rows of the last module wait"
    assert publisher.flush()


def test_the_listener_closes_at_once_and_frees_its_port(make_trainer, serve):
    server = serve(make_trainer())
    server._listener.close()
    with socket.create_server(("127.0.0.1", server.port)):
        pass
