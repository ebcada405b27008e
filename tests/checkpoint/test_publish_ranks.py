"""Four ranks publish to one server: their parts are one publish, and equal a checkpoint of the moment."""

from __future__ import annotations

import threading

import torch
from cases import TABLES, heat_of, plan_of, table_plan, with_slots
from sharded_ranks import Whole

import thermocline as tc
from thermocline.serve import ShardGroup
from thermocline.serve.publishing.listener import PublishListener

HEAT = heat_of()


class LateServer:
    """A server that opens the folder when the first rank connects: the ranks save it before."""

    def __init__(self, folder: str, secret: bytes) -> None:
        self._folder, self._lock, self.groups = folder, threading.Lock(), []
        self.listener = PublishListener(lambda _: self.group().publishes, "127.0.0.1", 0, secret, None)

    def group(self) -> ShardGroup:
        with self._lock:
            if not self.groups:
                self.groups.append(ShardGroup(self._folder, shards=2))
            return self.groups[0]

    def restarted(self) -> ShardGroup:
        self.groups.append(ShardGroup(self._folder, shards=3))
        return self.groups[-1]

    def close(self) -> None:
        self.listener.close()
        for group in self.groups:
            group.close()


def tables_in_all_tiers():
    user = with_slots(table_plan("user", 9, 14, "int8"), {1: (3, 0), 2: (4, 0), 3: (6, 0)})
    return [user, table_plan("item", 5, 0, "int8"), table_plan("shop", 0, 0, "int8", card=2)]


def check(groups, folder):
    """Servers answer what the checkpoint has that was saved at the end."""
    expected = Whole(precision="int8")
    tc.load_into(expected, folder + " expected")
    expected.tables.flush()
    for group in groups:
        served = group.lookup({name: torch.arange(rows) for name, (rows, _, _) in TABLES.items()})
        assert all(torch.equal(rows, expected.tables.get_rows(name)) for name, rows in served.items())
        assert all(torch.equal(group.current.dense[f"top.{n}"], each) for n, each in expected.top.named_parameters())


def test_all_ranks_raise_when_one_fails_and_nothing_is_lost(on_ranks, tmp_path):
    folder, plan = str(tmp_path / "saved"), plan_of(2, 2, tables_in_all_tiers(), HEAT)
    found = on_ranks("publish_after_a_failure", 4, plan, HEAT, {"precision": "int8"}, folder)
    assert [[bool(error) for error in raised] for raised in found] == [[True, True, False]] * 4
    assert "rank 1" in found[0][0] and "rank 1" not in found[1][0]
    with ShardGroup(folder, shards=2) as group:
        check([group], folder)


def test_steps_of_four_ranks_serve_the_rows_of_their_logs(on_ranks, tmp_path):
    folder, secret = str(tmp_path / "saved"), tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    server = LateServer(folder, secret.read_bytes())
    try:
        address = f"127.0.0.1:{server.listener.port}"
        plan, settings = plan_of(2, 2, tables_in_all_tiers(), HEAT), {"precision": "int8"}
        found = on_ranks("budget_ranks.publish_within_a_budget", 4, plan, HEAT, settings, folder, address, str(secret))
        assert all(served for served, _, _ in found) and any(steps for _, steps, _ in found)
        assert sum(waiting for _, _, waiting in found) > 0
        ids = {name: torch.arange(rows) for name, (rows, _, _) in TABLES.items()}
        live, restarted = (group.lookup(ids) for group in (server.group(), server.restarted()))
        assert server.groups[0].publishes.number == server.groups[1].publishes.number >= 6
        assert all(torch.equal(live[name], restarted[name]) for name in TABLES)
    finally:
        server.close()


def test_publishes_of_four_ranks_are_one_and_equal_a_checkpoint(on_ranks, tmp_path):
    """All three tiers, a table on one rank, and cache slots."""
    folder, secret = str(tmp_path / "saved"), tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    server = LateServer(folder, secret.read_bytes())
    try:
        address = f"127.0.0.1:{server.listener.port}"
        plan, settings = plan_of(2, 2, tables_in_all_tiers(), HEAT), {"precision": "int8"}
        found = on_ranks("train_and_publish", 4, plan, HEAT, settings, folder, address, str(secret))
        assert len({number for number, _, _ in found}) == 1
        assert all(done == [True] * 4 and states == ["live"] for _, done, states in found)
        check((server.group(), server.restarted()), folder)
    finally:
        server.close()
