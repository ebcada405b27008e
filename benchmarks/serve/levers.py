"""The levers, end to end: one trained model, its checkpoint reduced in several ways, each one served and queried.

    levers/fp32       a DLRM as it was trained, a table for each of 26 features
    levers/int8       its rows in another precision, as `checkpoint convert` writes them; also int4
    levers/pruned     ids seen at most once in training share one row, their mean
    levers/unified    the tables one after the other in one
    levers/all        int4, pruned and unified

`ours` is the bytes of rows and id maps on the shards; the ratio is fp32's bytes over these. `auc` is the AUC of the test part
by the scores of `rank` over gRPC; `lookups_per_s` is the rate of one client of `tables`. Both are served by four shards.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.runner.record import Recorder, brief
from benchmarks.serve.load_client import METHOD, OPTIONS
from benchmarks.serve.network import RunningServer, ours
from thermocline.checkpoint import Checkpoint, save
from thermocline.data.metrics import auc
from thermocline.ids.idmap import IdMap
from thermocline.models import DLRM
from thermocline.nn.collection import EmbeddingCollection, Table, unify
from thermocline.nn.config import RowConfig
from thermocline.serve.protocol import schema
from thermocline.serve.server.model_loader import ShardConfig
from thermocline.train import DLRMRun, DLRMSettings

CARDS, BATCH, IDS = 4, 512, 64
FULL = DLRMSettings(samples=120_000, rows=60_000, dim=32, seed=1)  # as in the demo
QUICK = DLRMSettings(samples=2_000, rows=3_000, dim=8, seed=1)
SECONDS = 3.0


class ServeArm(NamedTuple):
    """One way to serve the trained rows."""

    name: str
    precision: str = "fp32"
    pruned: bool = False
    unified: bool = False


ARMS = (
    ServeArm("fp32"),
    ServeArm("int8", "int8"),
    ServeArm("int4", "int4"),
    ServeArm("pruned", pruned=True),
    ServeArm("unified", unified=True),
    ServeArm("all", "int4", pruned=True, unified=True),
)


def run(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]) -> None:
    """Train once, and serve every wanted arm, and fp32 as the baseline."""
    arms = [arm for arm in ARMS if wanted(f"levers/{arm.name}")]
    if not arms:
        return
    settings = QUICK if quick else FULL
    progress(0, len(ARMS) + 1, "training")
    trained = DLRMRun(settings)
    trained.finish()
    model, base = trained.model, None
    for n, arm in enumerate([ARMS[0], *(arm for arm in arms if arm != ARMS[0])], 1):
        progress(n, len(ARMS) + 1, f"levers {arm.name}")
        try:
            with tempfile.TemporaryDirectory(prefix="thermocline-") as folder:
                found = _measure(Path(folder), arm, model, settings, 0.3 if quick else SECONDS)
        except Exception as error:
            recorder.fail(f"levers/{arm.name}", brief(error))
            continue
        base = base or found
        further = {"auc": found["auc"], "auc_change": found["auc"] - base["auc"], "lookups_per_s": found["lookups_per_s"]}
        recorder.add(
            f"levers/{arm.name}", found["bytes"], "bytes", "fp32", base["bytes"], base["bytes"] / found["bytes"], **further
        )


def _measure(folder: Path, arm: ServeArm, model: DLRM, settings: DLRMSettings, seconds: float) -> dict[str, float]:
    save(made_smaller(arm, model, settings), folder / "checkpoint")
    log = (folder / "log").open("w")
    log.close()
    server = RunningServer(ours(folder / "checkpoint", CARDS), folder / "log")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=OPTIONS) as channel:
            ask = channel.unary_unary(METHOD)
            first = next(settings.logs()[1].batches(2))
            server.wait(lambda _: _quietly(ask, _request("rank", _inputs(first))))
            found = {"auc": _auc(ask, settings), "lookups_per_s": _rate(ask, settings, seconds)}
    finally:
        server.end()
    maps = Checkpoint.open(folder / "checkpoint").id_maps.values()
    return found | {"bytes": ShardConfig(CARDS).layout(folder / "checkpoint").bytes + sum(each.bytes for each in maps)}


def made_smaller(arm: ServeArm, model: DLRM, settings: DLRMSettings) -> DLRM:
    """The trained model around other tables."""
    trained: Any = model.embeddings
    rows = {name: trained.get_rows(name) for name in trained.features}
    maps: dict[str, IdMap] = {}
    if arm.pruned:
        for feature, (name, values_RD) in enumerate(list(rows.items())):
            maps[name], rows[name] = _pruned(values_RD, _counts(settings, feature, len(values_RD)))
    tables = [Table(name, len(values_RD), settings.dim, ids=maps.get(name)) for name, values_RD in rows.items()]
    values: Mapping[str, torch.Tensor] = rows
    if arm.unified:
        tables, values = [unify("all", tables)], {"all": torch.cat(list(rows.values()))}
    made = EmbeddingCollection(tables, rows=RowConfig(arm.precision, cache=0.0))
    for name, values_RD in values.items():
        made.set_rows(name, torch.arange(len(values_RD)), values_RD)
    smaller = settings.model_of(made, len(rows), len(next(settings.logs()[0].batches(1)).dense_BI[0]))
    dense = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("embeddings")}
    missing, unknown = smaller.load_state_dict(dense, strict=False)
    assert not unknown and all(name.startswith("embeddings") for name in missing)
    return smaller


def _counts(settings: DLRMSettings, feature: int, rows: int) -> torch.Tensor:
    """How often the training part has each row."""
    ids_N = torch.cat([batch.ids_BF[:, feature] for batch in settings.logs()[0].batches(1 << 14)])
    return torch.bincount(ids_N, minlength=rows)


def _pruned(values_RD: torch.Tensor, counts_R: torch.Tensor) -> tuple[IdMap, torch.Tensor]:
    """A map that keeps rows seen at least twice, and the rows by it."""
    map = IdMap.pruned((counts_R > 1).nonzero()[:, 0])
    to_R = map(torch.arange(len(values_RD)))
    sums_KD = torch.zeros(map.rows, values_RD.shape[1]).index_add_(0, to_R, values_RD)
    return map, sums_KD / torch.bincount(to_R, minlength=map.rows).clamp(min=1)[:, None]


# -- asking -------------------------------------------------------------------------------------------------------------------


def _inputs(batch: Any) -> dict[str, NDArray[Any]]:
    """A batch of samples as candidates that share nothing."""
    found = {f"C{n + 1}": ids_B.numpy() for n, ids_B in enumerate(batch.ids_BF.t().contiguous())}
    return found | {"dense": batch.dense_BI.numpy()}


def _request(model: str, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    message = schema.ModelInferRequest(model_name=model)
    for name, array in arrays.items():
        message.inputs.add(name=name, datatype="INT64" if array.dtype == np.int64 else "FP32", shape=array.shape)
        message.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
    data: bytes = message.SerializeToString()
    return data


def _quietly(ask: Callable[..., bytes], request: bytes) -> None:
    try:
        ask(request, timeout=10)
    except grpc.RpcError as error:
        raise OSError(str(error)) from None


def _auc(ask: Callable[..., bytes], settings: DLRMSettings) -> float:
    scores, labels = [], []
    for batch in settings.logs()[1].batches(BATCH):
        response = schema.ModelInferResponse.FromString(ask(_request("rank", _inputs(batch)), timeout=60))
        scores.append(torch.from_numpy(np.frombuffer(response.raw_output_contents[0], np.float32).copy()))
        labels.append(batch.label_B)
    return auc(torch.cat(scores), torch.cat(labels) > 0.5)


def _rate(ask: Callable[..., bytes], settings: DLRMSettings, seconds: float) -> float:
    """Lookups per second of one client, with ids of the test part in order."""
    batches = [batch for _, batch in zip(range(32), settings.logs()[1].batches(IDS), strict=False)]
    inputs = [_inputs(batch) for batch in batches]
    requests = [_request("tables", {name: each for name, each in one.items() if name != "dense"}) for one in inputs]
    lookups, done, begin = sum(batch.ids_BF.numel() for batch in batches) / len(batches), 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        ask(requests[done % len(requests)], timeout=60)
        done += 1
    return done * lookups / (time.perf_counter() - begin)
