"""Three tables, their heat and a cluster, for tests of what plans say."""

from __future__ import annotations

from thermocline.heat.curve import Curve
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology

ITEM = {"name": "item", "rows": 100_000, "dim": 64, "pooling": "none", "lookups": 20}
USER = {"name": "user", "rows": 1_000_000, "dim": 32}
COUNTRY = {"name": "country", "rows": 200, "dim": 16}
HEAT = {
    "item": Curve.zipf(80_000, 1.1, 1e7),
    "user": Curve.zipf(1_000_000, 0.6, 1e6),
    "country": Curve.zipf(200, 1.2, 1e6),
}


def tables(*each, **changes):
    return TablesConfig.model_validate({"batch": 512, "dense": "2ms", "tables": each or (ITEM, USER, COUNTRY)} | changes)


def cluster(nodes=2, cards=4, **card):
    links = {"node": {"bandwidth": "450GB/s", "latency": "10us"}, "cluster": {"bandwidth": "50GB/s", "latency": "20us"}}
    return Topology.model_validate(
        {"nodes": nodes, "cards_per_node": cards, "card": {"memory": "80GB", "bandwidth": "3TB/s"} | card, "links": links}
        | {"backend": "gloo"}
    )
