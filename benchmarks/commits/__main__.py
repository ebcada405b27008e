"""Races two checkouts of this project against each other: `python -m benchmarks.commits --old ../old --json race.json`.

Each checkout runs in its own process. Both build the same case, then they are timed in turn (A B B A ...), round after round.
`ratio` is the old time over the new one: above 1, the new checkout is faster. The output of a fixed batch is compared, too.

    cuda/A/zipf/int8+5%/step         forward, backward and update of `EmbeddingCollection`
    cuda/A/zipf/int8+5%/lookup       forward without gradient
    cuda/A/zipf/int8+5%/host-step    rows in host memory, prefetched
    cuda/A/zipf/int8/served          the served lookup of rows over four shards on one device
    cpu/server/64/1                  requests of 64 ids by one client, in requests a second of the server's processor time

Tables are made by public names of the package; `worker.py` knows the signatures of both checkouts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.commits.cases import Case, all_cases
from benchmarks.kernels.worker import Worker
from benchmarks.runner.record import Recorder, brief, cores
from benchmarks.runner.timing import Chunk, enough, interleave

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = "old", "new"
ROUNDS, CHUNK_MS, LEAST, MOST = 10, 30.0, 8, 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race; the exit code is 1 if a case failed or is slower than `--tolerance` allows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description="Race two checkouts of this project.")
    parser.add_argument("--old", type=Path, required=True, help="Checkout to compare with.")
    parser.add_argument("--new", type=Path, default=ROOT, help="Checkout to judge (default: this one).")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="Device to race on.")
    parser.add_argument("--filter", default="", help="Only cases whose name contains this.")
    parser.add_argument("--quick", action="store_true", help="Small sizes, few rounds: a smoke test.")
    parser.add_argument("--seconds", type=float, default=330.0, help="No case starts later than this.")
    parser.add_argument("--threads", type=int, default=cores(), help="Threads of each process.")
    parser.add_argument("--tolerance", type=float, default=0.03, help="Largest loss that passes.")
    parser.add_argument("--json", type=Path, help="File for the record.")
    given = parser.parse_args(arguments)
    recorder = Recorder("commits", print, judged=False)
    race = Race(recorder, {OLD: given.old.resolve(), NEW: given.new.resolve()}, given.threads, given.quick)
    race.run(given.device, given.filter, time.monotonic() + given.seconds)
    if given.device == "cpu" and given.filter in "cpu/server/64/1 cpu/server/64/8":
        race.servers()
    if given.json:
        given.json.write_text(json.dumps(recorder.record, indent=2) + "\n", encoding="utf-8")
    return _conclude(recorder, given.tolerance)


class Race:
    """Two checkouts, and the record of their times."""

    def __init__(self, recorder: Recorder, checkouts: dict[str, Path], threads: int, quick: bool) -> None:
        self.recorder, self.checkouts, self.threads, self.quick = recorder, checkouts, threads, quick

    def environment(self, name: str) -> dict[str, str]:
        """Imports the package of a checkout, and this harness."""
        path = os.pathsep.join([str(self.checkouts[name] / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        threads = {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        return {**os.environ, **threads, "PYTHONPATH": path}

    @contextmanager
    def workers(self) -> Iterator[dict[str, Worker]]:
        command = [sys.executable, "-m", "benchmarks.commits.worker"]
        workers = {name: Worker(command, self.environment(name)) for name in self.checkouts}
        try:
            for name, worker in workers.items():
                source = Path(worker.ask("hello")["source"])
                assert source.is_relative_to(self.checkouts[name]), f"{name} imports {source}"
            yield workers
        finally:
            for worker in workers.values():
                worker.close()

    def run(self, device: str, filter: str, until: float) -> None:
        """Race every wanted case until the time is over."""
        cases = [case for case in all_cases(device, self.quick) if filter in case.name]
        with self.workers() as workers:
            for case in cases:
                if time.monotonic() > until:
                    self.recorder.note(f"left out, the time was over: {case.name}")
                    continue
                try:
                    self._race(case, workers)
                except Exception as error:
                    self.recorder.fail(case.name, brief(error))

    def _race(self, case: Case, workers: dict[str, Worker]) -> None:
        digests = {name: worker.ask("build", case=case.to_json())["digest"] for name, worker in workers.items()}
        chunks = {name: _chunk(worker) for name, worker in workers.items()}
        # The same number for both: tables of later cases have seen as many steps, and their bits can be compared.
        iterations = max([enough(chunk(4), CHUNK_MS, LEAST, MOST) for chunk in chunks.values()])
        times = interleave(chunks, 2 if self.quick else ROUNDS, dict.fromkeys(chunks, iterations))
        old, new = times[OLD], times[NEW]
        by_round = [before / after for before, after in zip(old.rounds, new.rounds, strict=True)]
        self.recorder.add(
            case.name, new.median, "ms", OLD, old.median, old.median / new.median, new.spread,
            peer_spread=old.spread, ratio_range=[min(by_round), max(by_round)], same_bits=digests[OLD] == digests[NEW],
        )  # fmt: skip

    def servers(self) -> None:
        """Race the servers of both checkouts over gRPC."""
        from benchmarks.serve import network

        budget = network.QUICK if self.quick else network.FULL
        with tempfile.TemporaryDirectory() as folder:
            table, checkpoint = network.make_table(Path(folder), budget.rows)
            contenders = [self._server(name, checkpoint) for name in self.checkouts]
            for clients in (1, 8):
                case = f"cpu/server/64/{clients}"
                found = network.race(contenders, table, 64, clients, budget, self.recorder)
                if not all(found.values()):
                    self.recorder.fail(case, "a server did not start")
                    continue
                rates = {name: [each["requests_per_cpu_s"] for each in rounds] for name, rounds in found.items()}
                old, new = (sorted(rates[name])[len(rates[name]) // 2] for name in (OLD, NEW))
                by_round = [after / before for before, after in zip(rates[OLD], rates[NEW], strict=True)]
                unit = "requests/CPU-s"
                self.recorder.add(case, new, unit, OLD, old, new / old, ratio_range=[min(by_round), max(by_round)])

    def _server(self, name: str, checkpoint: Path) -> Any:
        from benchmarks.serve.network import ServerContender

        start = "import sys; sys.argv[0] = 'thermocline'; from thermocline.cli import main; main()"
        variables = [f"{key}={value}" for key, value in self.environment(name).items() if key in ("PYTHONPATH",)]
        command = ["env", *variables, sys.executable, "-c", start, "serve", "run", str(checkpoint)]
        return ServerContender(name, [*command, "--grpc-port", "PORT", "--http-port", "0", "--quiet"])


def _chunk(worker: Worker) -> Chunk:
    run: Callable[..., dict[str, Any]] = worker.ask

    def chunk(iterations: int) -> list[float]:
        taken: list[float] = run("run", iterations=iterations)["ms"]
        return taken

    return chunk


def _conclude(recorder: Recorder, tolerance: float) -> int:
    """Print the summary: failed cases, other bits, and the worst ratio."""
    failed = [row["case"] for row in recorder.rows if "error" in row]
    measured = sorted((row for row in recorder.rows if row["ratio"] is not None), key=lambda row: float(row["ratio"]))
    other = [row["case"] for row in measured if row.get("same_bits") is False]
    slow = [row for row in measured if row["ratio"] < 1 - tolerance]
    limit = 1 - tolerance
    print(f"{len(measured)} cases, {len(failed)} failed, {len(slow)} slower than {limit:.2f}x, {len(other)} with other bits")
    for row in slow:
        low, high = row["ratio_range"]
        print(f"slower: {row['case']} {row['peer_value']:.4g} -> {row['ours']:.4g} {row['unit']}, "
              f"{row['ratio']:.3f}x [{low:.3f}, {high:.3f}]")  # fmt: skip
    for case in other:
        print(f"other bits: {case}")
    if measured:
        print(f"worst: {measured[0]['case']} {measured[0]['ratio']:.3f}x")
    return 1 if failed or slow or other else 0


if __name__ == "__main__":
    sys.exit(main())
