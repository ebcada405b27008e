"""Python processes that fork from one with torch and the package imported: imports take seconds of a processor, a fork none.

What depends on a fresh interpreter (which modules are imported, variables that libraries read when they are loaded, output to
a full disk) needs `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOAD = ["pytest", "thermocline.distributed.shard", "thermocline.train", "thermocline.checkpoint.save_job"]
_TIMEOUT = 600.0  # seconds until a test gives up on a process


class Forked:
    """A process that runs Python code with arguments. `stderr`: a file to append to in place of the one that `finish` reads."""

    def __init__(
        self, code: str, *arguments: object, cwd: str | Path | None = None, stderr: str | Path | None = None, **environment: str
    ) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)  # counts until the first process of any test starts
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._out, self._err = (os.path.join(self._folder.name, name) for name in ("out", "err"))
        where = (str(cwd or os.getcwd()), {**os.environ, **environment}, self._out, str(stderr or self._err))
        self._process = context.Process(target=_run, args=(code, [str(each) for each in arguments], *where))
        self._process.start()

    def finish(self) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` returns."""
        self._process.join(_TIMEOUT)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError("the process did not end")
        out, err = (Path(file).read_text() if os.path.exists(file) else "" for file in (self._out, self._err))
        self._folder.cleanup()
        return subprocess.CompletedProcess([], self._process.exitcode, out, err)


def _run(code: str, arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    for number, file in ((0, os.devnull), (1, out), (2, err)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


def script(path: str | Path, *arguments: object, **options: Any) -> Forked:
    """A process that runs a file, which may import the modules beside it."""
    folder = os.path.dirname(path)
    code = f"import runpy, sys; sys.path.insert(0, {folder!r}); runpy.run_path({str(path)!r}, run_name='__main__')"
    return Forked(code, *arguments, **options)


def thermocline(*arguments: object, before: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line; `before` is Python code to run there first."""
    code = f"import sys\n{before}\nsys.argv[0] = 'thermocline'\nfrom thermocline.cli import main\nmain()"
    return Forked(code, *arguments, **{"NO_COLOR": "1", "COLUMNS": "100", **options}).finish()
