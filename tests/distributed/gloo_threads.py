"""Run a script and say how many of gloo's threads were left when the interpreter began to shut down.

A thread that was joined may be listed a moment longer, until the kernel has taken it away: as long as there are more than the
argument after the script says, this looks again for a while.
"""

from __future__ import annotations

import atexit
import runpy
import sys
import time
from pathlib import Path


@atexit.register  # the first to be registered is the last to be called
def _count() -> None:
    end = time.monotonic() + 60
    while (left := sum(_name(task) == "pt_gloo_runloop" for task in Path("/proc/self/task").iterdir())) > int(sys.argv[2]):
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    print(f"threads of gloo left: {left}\n", end="")


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""


runpy.run_path(sys.argv[1], run_name="__main__")
