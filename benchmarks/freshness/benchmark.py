"""`python -m benchmarks freshness`: from a step of the trainer to what clients read.

    freshness/step-to-served    p99 in seconds, by changed rows, at 100,000 changed rows a second (int8, 64 columns)
    freshness/read-p99          p99 of reads while the trainer publishes, over windows in which it only trains
    freshness/trainer-share     share of the training thread's time in publishes, of 2% asked
    freshness/step-overhead     processor time of a step with publishing, counting included, over one without
    freshness/memory            of the server over 10,000 publishes: middle third over last
    freshness/LOG/staleness     mean age in seconds of what lookups of a real log see, with a tenth of the bytes
    freshness/LOG/auc           progressive validation: AUC with a tenth of the bytes, less that of publishing everything

`live.py` has trainer, server and clients, `replay.py` the logs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import thermocline
from benchmarks.freshness.live import DIM, LiveServer, LiveTrainer, ask, quantile
from benchmarks.freshness.replay import LOGS, Replay, read_log
from benchmarks.runner.record import Recorder

P99_S, SHARE, AGE_S, AUC = 1.0, 0.02, 2.0, 2e-4
Progress = Callable[[int, int, str], None]


def run(data: Path, filter: str | None, quick: bool, progress: Progress) -> dict[str, object]:
    """Measure all cases whose names contain `filter`."""
    recorder = Recorder("freshness", lambda line: None, judged=not quick)
    parts: list[tuple[str, Callable[[], None]]] = [
        ("freshness/step-to-served read-p99 trainer-share step-overhead", lambda: _live(recorder, quick)),
        ("freshness/memory", lambda: _memory(recorder, 200 if quick else 10_000)),
    ]
    parts += [(f"freshness/{log}/staleness auc", lambda log=log: _replay(recorder, log, data, quick)) for log in LOGS]  # type: ignore[misc]
    for number, (names, measure) in enumerate(parts):
        if filter is None or filter in names:
            progress(number, len(parts), names)
            measure()
    return recorder.record


def _live(recorder: Recorder, quick: bool) -> None:
    rows, seconds, rounds = (20_000, 1.0, 1) if quick else (1_000_000, 5.0, 5)
    with tempfile.TemporaryDirectory() as temporary:
        folder, secret = Path(temporary) / "checkpoint", Path(temporary) / "secret"
        secret.write_text("a secret of this benchmark alone")
        trainer = LiveTrainer(folder, rows)
        thermocline.save(trainer.model, folder)
        server = LiveServer(folder, secret)
        waits: dict[bool, list[float]] = {True: [], False: []}
        try:
            trainer.publisher = thermocline.publish(trainer.model, folder, to=server.publish, secret_file=secret)
            trainer.publisher.flush()
            for _ in range(5):
                trainer.step()  # compiles
            trainer.seconds, trainer.counts, trainer.steps = {True: 0.0, False: 0.0}, {True: 0, False: 0}, 0
            began = time.monotonic()
            with trainer.training():
                for turn in range(2 * rounds):
                    trainer.start_window(bool(turn % 2))
                    waits[bool(turn % 2)].append(ask(server, seconds, rows)["p99_ms"])
            rate = trainer.steps * 5000 / (time.monotonic() - began)
            number, share = trainer.publisher.number, trainer.publisher.share
            trainer.publisher.close()
        finally:
            server.end()
    p50, p99 = quantile(trainer.latencies, 0.5), quantile(trainer.latencies, 0.99)
    recorder.add("freshness/step-to-served", p99, "s", "asked", P99_S, P99_S / p99, p50=p50, rows_per_s=rate, publishes=number)
    quiet, busy = statistics.median(waits[False]), statistics.median(waits[True])
    spread = (max(waits[True]) - min(waits[True])) / busy
    recorder.add(
        "freshness/read-p99", busy, "ms", "without publishing", quiet, quiet / busy, spread=spread, windows=len(waits[True])
    )
    recorder.add("freshness/trainer-share", share, "share", "asked", SHARE, SHARE / max(share, 1e-9))
    with_s, without_s = (trainer.seconds[each] / max(trainer.counts[each], 1) for each in (True, False))
    recorder.add("freshness/step-overhead", 1e3 * with_s, "ms", "without publishing", 1e3 * without_s, without_s / with_s)


def _memory(recorder: Recorder, publishes: int) -> None:
    """Many small publishes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, secret = Path(temporary) / "checkpoint", Path(temporary) / "secret"
        secret.write_text("a secret of this benchmark alone")
        model = thermocline.Embedding(10_000, DIM, rows=thermocline.RowConfig("int8", cache=0.05))
        thermocline.save(model, folder)
        server, held = LiveServer(folder, secret), []
        try:
            publisher = thermocline.publish(model, folder, to=server.publish, secret_file=secret, interval=0.0)
            publisher.flush()
            while publisher.number < publishes:
                model(torch.randint(10_000, (64,))).sum().backward()
                publisher._seal(time.perf_counter(), None)  # whatever the share of time
                publisher._wait_idle(time.monotonic() + 60.0)
                if publisher.number % max(publishes // 300, 1) == 0:
                    held.append(server.private_bytes())
            publisher.close()
        finally:
            server.end()
    third = len(held) // 3
    middle, last = statistics.median(held[third : 2 * third]), statistics.median(held[2 * third :])
    recorder.add("freshness/memory", last, "bytes", "middle third", middle, middle / last, publishes=publishes)


def _replay(recorder: Recorder, name: str, data: Path, quick: bool) -> None:
    case = f"freshness/{name}"
    if not (data / LOGS[name]).exists():
        recorder.note(f"{case}: no {LOGS[name]} in {data}")
        return
    log = read_log(name, data, 4096 if quick else 109_711)
    everything = Replay(log, None).run()
    tenth = Replay(log, everything["bytes"] / 10).run()
    ages = {f"age_{key}": tenth[key] for key in ("p50", "p99")}
    recorder.add(
        f"{case}/staleness", tenth["mean"], "s", "asked", AGE_S, AGE_S / max(tenth["mean"], 1e-9), **ages,
        everything=everything["mean"], bytes_per_s=tenth["bytes"], all_bytes_per_s=everything["bytes"], seconds=tenth["s"],
    )  # fmt: skip
    lost = everything["auc"] - tenth["auc"]
    recorder.add(f"{case}/auc", tenth["auc"], "AUC", "everything", everything["auc"], float(lost <= AUC), lost=lost)
