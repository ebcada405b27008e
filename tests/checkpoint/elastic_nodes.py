"""A node is lost and another one joins, under `torchrun --nnodes=1:2`: a script to run by hand, on one machine.

    PYTHONPATH=src python tests/checkpoint/elastic_nodes.py

Two agents of torchrun, each a node with one rank, train and save. One agent and its rank are killed with SIGKILL: the rank of
the other fails at the next exchange, and its agent starts it again, alone, from the last complete save. Then a third agent is
started, and both go on from the save after that. All rows are compared with those of one process that did the same steps.

It is no test of the suite: agents take another for dead that has not been heard of for some seconds, and a busy machine keeps
them from being heard.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]
CONFIGURATION = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=5"  # seconds that agents wait for each other
PATIENCE = 180.0
Began = tuple[int, int, int, int]  # ranks, first step, process of the agent and of the rank


class Job:
    """Agents of one job, and what its ranks have noted in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.agents, self.began_at = folder, list[subprocess.Popen[bytes]](), time.monotonic()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]

    def start(self) -> subprocess.Popen[bytes]:
        """One more node; the first one is where they meet."""
        paths = [str(HERE.parent / "distributed"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}", "--rdzv-id", "job"]
        launcher += ["--rdzv-conf", f"is_host={int(not self.agents)},{CONFIGURATION}", "--max-restarts", "5"]
        command = [*launcher, "--monitor-interval", "0.1", str(HERE / "elastic_job.py"), str(self.folder)]
        with open(self.folder / f"agent{len(self.agents)}.out", "wb") as out:
            self.agents.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        return self.agents[-1]

    def let(self, step: int) -> None:
        """Ranks may train until before this step."""
        (self.folder / "until.part").write_text(str(step))
        os.replace(self.folder / "until.part", self.folder / "until")

    def began(self) -> list[Began]:
        log = self.folder / "log"
        return [tuple(map(int, line.split())) for line in log.read_text().splitlines()] if log.exists() else []  # type: ignore[misc]

    def saved(self) -> int:
        manifest = self.folder / "saved" / "manifest.json"
        return int(json.loads(manifest.read_text())["progress"]["step"]) if manifest.exists() else 0

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """As if its machine had lost power."""
        ranks = [process for _, _, parent, process in self.began() if parent == agent.pid]
        os.kill(agent.pid, signal.SIGKILL)
        os.kill(ranks[-1], signal.SIGKILL)
        agent.wait()

    def wait(self, come: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not come():
            assert time.monotonic() < end, f"not within {PATIENCE:.0f} seconds: {what}; its output is in {self.folder}"
            time.sleep(0.05)
        print(f"{time.monotonic() - self.began_at:6.1f} s  {what}", flush=True)

    def end(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()  # which ends its ranks


def main(folder: Path) -> None:
    from elastic_job import STEPS
    from test_elastic import digest_of_one_process

    job = Job(folder)
    job.let(0)
    try:
        first, second = job.start(), job.start()
        both = {first.pid, second.pid}
        job.wait(lambda: both <= {agent for ranks, _, agent, _ in job.began() if ranks == 2}, "two nodes have begun")
        job.let(4)
        job.wait(lambda: job.saved() == 3, "they have saved step 3; one of them is killed")
        job.kill(second)
        job.let(7)
        job.wait(lambda: (1, 3) in [each[:2] for each in job.began()], "the other one goes on alone, from step 3")
        job.wait(lambda: job.saved() == 6, "it has saved step 6; a node joins")
        both = {first.pid, job.start().pid}
        job.wait(lambda: both <= {each[2] for each in job.began() if each[:2] == (2, 6)}, "two nodes go on, from step 6")
        job.let(STEPS)
        job.wait(lambda: job.agents[0].poll() is not None and job.agents[2].poll() is not None, "they have come to the end")
        assert job.agents[0].returncode == job.agents[2].returncode == 0
        expected = digest_of_one_process([2] * 3 + [1] * 3 + [2] * (STEPS - 6))
        assert (folder / "digest").read_text() == expected, "rows differ from those of one process"
        print("all rows are those of one process that did the same steps")
    finally:
        job.end()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
