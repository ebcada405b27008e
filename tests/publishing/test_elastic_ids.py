"""Elastic ids on their way to a server: an id and its row arrive together, and a request sees one publish of both."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch

import thermocline
from support import has
from thermocline import IdMap, RowConfig, Table
from thermocline.checkpoint.publishes.log import PublishLog
from thermocline.errors import BadPublish
from thermocline.ids.moved_ids import MovedIds

FEATURES, DIMS = ("hour", "seen", "bought", "shop"), (8, 12, 12, 8)


class ElasticTrainer:
    """Ids that slide over two tables, one shared by two features."""

    def __init__(self, folder, precision="int8", rows=300, **further):
        self.folder, self.step, self.seen = folder, 0, torch.zeros(0, dtype=torch.int64)
        item = IdMap.elastic(rows, admit_after=2, half_life=4, ttl=9)
        shop = IdMap.elastic(90, shared=3, evict="lru", salt=5)
        tables = [
            Table("hour", 24, 8), Table("item", rows, 12, features=("seen", "bought"), ids=item), Table("shop", 90, 8, ids=shop)
        ]  # fmt: skip
        self.model = thermocline.EmbeddingCollection(tables, rows=RowConfig(precision, **{"cache": 0.1, **further}))

    def train(self, steps=1):
        for _ in range(steps):
            draw = torch.Generator().manual_seed(self.step)
            ids = torch.randint(9 * self.step, 9 * self.step + 250, (64, 3), generator=draw) * 7919_000_017 - (1 << 40)
            hours = torch.randint(0, 24, (64, 1), generator=draw)
            self.model(torch.cat([hours, ids], 1)).values().square().sum().backward()
            new = ids[~torch.isin(ids, self.seen)].unique()
            self.seen, self.step = torch.cat([self.seen, new]), self.step + 1  # in the order in which they appeared

    def expected(self):
        """What a checkpoint of this moment answers, by feature: rows of all ids that were ever seen, and which are known."""
        thermocline.save(self.model, self.folder.parent / "expected")
        again = thermocline.load(self.folder.parent / "expected").eval()
        again.flush()
        with torch.no_grad():
            rows = again({name: (each, torch.arange(len(each) + 1)) for name, each in asked(self.seen).items()})
        return rows, {name: again.elastic(name).rows_of(self.seen) >= 0 for name in FEATURES[1:]}


def asked(seen):
    return {name: torch.arange(len(seen)) % 24 if name == "hour" else seen for name in FEATURES}


def serves(server, expected, version=None):
    rows, known = expected
    size = len(next(iter(known.values())))
    ids = {name: each.numpy() for name, each in asked(server.seen[:size]).items()}
    (found,) = server.group.infer([ids], version)
    found = found.only([*FEATURES, *(f"{name}.known" for name in known)])
    right = [np.array_equal(found[name], rows[name].numpy()) for name in FEATURES]
    return all(right) and all(np.array_equal(found[f"{name}.known"], each.numpy()) for name, each in known.items())


@pytest.fixture
def trainer(tmp_path):
    trainer = ElasticTrainer(tmp_path / "checkpoint")
    trainer.train(8)
    return trainer


def published(trainer, server, publisher):
    """Train and publish; ids that a server answers are those that were seen."""
    assert publisher.flush()
    server.seen = trainer.seen
    return trainer.expected()


def test_ids_and_rows_equal_a_checkpoint_of_the_moment(trainer, serve, publish):
    server = serve(trainer)
    publisher = publish(trainer, server)
    for steps in (1, 0, 5, 17):
        trainer.train(steps)
        expected = published(trainer, server, publisher)
        assert serves(server, expected) and server.group.current.is_in_place
    assert trainer.model.elastic("seen").state()["evicted"] > 20 < trainer.model.elastic("seen").state()["expired"]
    thermocline.save(trainer.model, trainer.folder, incremental=True)
    trainer.train(2)
    expected = published(trainer, server, publisher)
    again = serve(trainer, shards=3)
    again.seen = trainer.seen
    assert serves(again, expected) and again.publishes.number == publisher.number, "from checkpoint and log"
    publisher.close()
    assert trainer.model.maps.keys[0].moved is None


def test_a_publisher_that_ends_leaves_the_ids_to_the_next(trainer, serve, publish):
    publish(trainer)._end()
    server = serve(trainer)
    publisher = publish(trainer, server)
    trainer.train(5)
    assert serves(server, published(trainer, server, publisher))


def test_merged_publishes_have_the_ids_of_the_last(trainer, serve, publish):
    publisher = publish(trainer)
    for _ in range(65):
        trainer.train(1)
        assert publisher.flush()
    assert [each.since for each in PublishLog(trainer.folder, publisher._run).files()].count(0) == 2
    server = serve(trainer)
    expected = published(trainer, server, publisher)
    assert server.group.follow() and serves(server, expected)


def test_a_held_version_keeps_its_ids_while_others_move(trainer, serve, publish):
    server = serve(trainer)
    publisher = publish(trainer, server)
    before = published(trainer, server, publisher)
    held, seen = server.group.current, trainer.seen
    for _ in range(3):
        trainer.train(6)
        after = published(trainer, server, publisher)
        assert serves(server, after) and not server.group.current.is_in_place
        server.seen = seen
        assert serves(server, before, held)
        server.seen = trainer.seen
    del held
    assert server.group.settle() and server.group.current.is_in_place and serves(server, after)


def test_rolling_back_brings_back_ids_that_were_evicted(trainer, serve, publish):
    server = serve(trainer)
    publisher, expected = publish(trainer, server), {}
    for _ in range(4):
        trainer.train(5)
        expected[publisher.number] = published(trainer, server, publisher)
    for number in (3, 1):
        server.publishes.roll_back(number)
        assert serves(server, expected[number])
    server.publishes.resume()
    assert serves(server, published(trainer, server, publisher))


def test_no_id_reads_the_row_of_another_while_ids_come_and_go(tmp_path, serve, publish):
    """The row of an id has the id's number; shared rows are zero. Readers look while every publish moves most ids."""
    trainer = ElasticTrainer(tmp_path / "checkpoint", "fp32", rows=1017, cache=0.0, optimizer=thermocline.SGD(lr=0.0))
    trainer.model.train()
    draw, universe, wrong, ended = torch.Generator().manual_seed(1), torch.arange(1, 3001), [], threading.Event()

    def step():
        ids = universe[torch.randint(0, 3000, (900,), generator=draw)]
        batch = torch.stack([ids % 24, ids, ids, ids % 80], 1)
        trainer.model(batch).values().sum().backward()
        owners = trainer.model.elastic("seen")
        own = owners.ids()
        trainer.model.set_rows("item", owners.rows_of(own), own.float()[:, None].expand(-1, 12))
        trainer.model.set_rows("item", torch.arange(1001, 1017 + 0), torch.zeros(16, 12))

    def read(server):
        ids = universe.numpy()
        while not ended.is_set():
            (found,) = server.group.infer([{"seen": ids}])
            rows, known = found["seen"], found.only(["seen.known"])["seen.known"]
            if not np.array_equal(rows[:, 0], np.where(known, ids, 0)) or (rows.min(1) != rows.max(1)).any():
                wrong.append(found.version)

    for _ in range(2):
        step()
    server = serve(trainer)
    publisher = publish(trainer, server)
    readers = [threading.Thread(target=read, args=(server,)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(25):
        step()
        assert publisher.flush()
    ended.set()
    for reader in readers:
        reader.join()
    assert not wrong and trainer.model.elastic("seen").state()["evicted"] > 1000


def test_moved_ids_go_at_once_whatever_the_budget(trainer, serve, publish):
    server = serve(trainer)
    publisher = publish(trainer, server, budget="1KiB")
    assert publisher.flush()
    for _ in range(6):
        trainer.train(2)
        born = trainer.model.elastic("shop").ids()
        publisher._seal(0.0, 100.0)
        publisher._wait_idle(float("inf"))
        assert publisher._links[0].wait_for(publisher.number, 30.0)
        (found,) = server.group.infer([{"shop": trainer.seen.numpy()}])
        known = trainer.model.elastic("shop").rows_of(trainer.seen) >= 0
        assert np.array_equal(found.only(["shop.known"])["shop.known"], known.numpy()) and len(born) > 60
    server.seen = trainer.seen
    assert not serves(server, trainer.expected()), "rows wait for the budget"
    assert serves(server, published(trainer, server, publisher))


def test_ids_that_loading_replaced_are_published(trainer, serve, publish, tmp_path):
    server = serve(trainer)
    publisher = publish(trainer, server)
    thermocline.save(trainer.model, tmp_path / "early")
    state = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    early = published(trainer, server, publisher)
    for load in (
        lambda: thermocline.load_into(trainer.model, tmp_path / "early"),
        lambda: trainer.model.load_state_dict(state),
    ):
        trainer.train(20)
        assert not serves(server, published(trainer, server, publisher)) or trainer.seen.numel() > len(early[1]["seen"])
        load()
        assert publisher.flush() and serves(server, early)


def test_ids_on_rows_that_they_cannot_have_are_refused(trainer, serve, publish):
    server = serve(trainer)
    publisher = publish(trainer, server)
    trainer.train(20)
    expected = published(trainer, server, publisher)
    (parts,) = list(PublishLog(trainer.folder, publisher._run).after(0))[-1:]
    part = dataclasses.replace(parts[-1], number=9, since=publisher.number, deltas={})
    moved = part.ids["item"]
    bad = [
        moved._replace(ids_K=moved.ids_K.roll(1)),
        moved._replace(rows_K=moved.rows_K + 300),
        moved._replace(rows_K=moved.rows_K.flip(0)),
        moved._replace(rows_K=moved.rows_K - moved.rows_K[0] - 1),
    ]
    for each in bad:
        with pytest.raises(BadPublish, check=has(reason="damaged", table="item")):
            server.publishes.offer(dataclasses.replace(part, ids={"item": each}), 0.0)
    with pytest.raises(BadPublish, check=has(table="hour")):
        server.publishes.offer(dataclasses.replace(part, ids={"hour": MovedIds(*(each[:1] for each in moved))}), 0.0)
    assert serves(server, expected)
