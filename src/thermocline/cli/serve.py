"""`thermocline serve`: tables of a checkpoint over several cards, behind the Open Inference Protocol."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thermocline.errors import BadInput

from .options import Debug, DeviceName, Json, Quiet
from .output import at_work, console, progress_bar, write_json

if TYPE_CHECKING:
    from thermocline.serve.server.auth import Secrets
    from thermocline.serve.server.model_loader import Cards
    from thermocline.serve.server.server import Server, Settings

app = typer.Typer(
    help="Serve the tables of a checkpoint over several cards.",
    epilog="Example:  thermocline serve run checkpoint --cards 4",
    no_args_is_help=True,
)


class SplitName(str, Enum):
    """Which card holds which row."""

    hash = "hash"
    range = "range"
    feature = "feature"
    plan = "plan"


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder of checkpoints.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint.")]
Count = Annotated[int, typer.Option("--cards", min=1, help="GPUs, or processes that stand for them.")]
Split = Annotated[SplitName, typer.Option("--split", help="Which card holds which row.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="The plan.json of --split plan.")]
HeatFile = Annotated[Path | None, typer.Option("--heat", metavar="FILE.tc", help="The heat file that the plan was made from.")]
On = Annotated[DeviceName, typer.Option("--device", help="Where the cards are.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")]
HttpPort = Annotated[int, typer.Option("--http-port", min=0, max=65_535, help="Of HTTP; 0 takes a free one.")]
GrpcPort = Annotated[int, typer.Option("--grpc-port", min=0, max=65_535, help="Of gRPC; 0 takes a free one.")]
Follow = Annotated[
    float, typer.Option("--follow", min=0.0, help="Look every so many seconds for what was saved since; 0 never.")
]
Wait = Annotated[float, typer.Option("--wait", min=0.0, help="Latency budget of a micro-batch, in milliseconds.")]
Queue = Annotated[int, typer.Option("--queue", min=1, help="Requests that may wait; more are refused.")]
MaxIds = Annotated[int, typer.Option("--max-ids", min=1, help="Ids of one request.")]
MaxMessage = Annotated[int, typer.Option("--max-message", min=1, help="MiB of one request.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="Serve only who sends this bearer token.")]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate (PEM); needs --tls-key.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key (PEM).")]


@app.command(epilog="Example:  thermocline serve run checkpoint --cards 4 --grpc-port 8001")
def run(
    folder: Folder,
    cards: Count = 4,
    split: Split = SplitName.hash,
    plan: PlanFile = None,
    heat: HeatFile = None,
    device: On = DeviceName.cpu,
    host: Host = "127.0.0.1",
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    follow: Follow = 0.0,
    wait: Wait = 0.0,
    queue: Queue = 1024,
    max_ids: MaxIds = 1 << 18,
    max_message: MaxMessage = 64,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C: gRPC and HTTP, /metrics, and a status page at /. Logs are JSON lines on standard error.

    Under `torchrun --nproc-per-node 1`, cards are spread over its hosts: the first is the front, FOLDER is on all of them.

    With --json, where it listens is written when it is ready.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its errors come back to us; it need not print them as well
    # Before torch is loaded. A second thread for one lookup costs more than it saves while requests come side by side.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if _holds_cards():
        return
    asked = _cards(cards, split, plan, heat, device)
    secrets = _secrets(token_file, tls_cert, tls_key)
    try:
        from thermocline.serve.server.buffer_pool import keep_memory
        from thermocline.serve.server.json_log import write_to_stderr
        from thermocline.serve.server.limits import Limits
        from thermocline.serve.server.model_loader import make_repository
        from thermocline.serve.server.server import Settings
        from thermocline.serve.server.server import run as run_server
    except ModuleNotFoundError as error:
        raise BadInput(f"the server needs {error.name}: pip install 'thermocline[serve]'") from error

    limits = Limits(message=max_message << 20, ids=max_ids, queue=queue, wait=wait / 1000)
    settings = Settings(host, http_port, grpc_port, secrets, limits, follow)
    write_to_stderr(quiet)
    keep_memory()

    bar = ExitStack()
    bar.enter_context(progress_bar(quiet))(0, 1, "loading")

    def say(server: Server) -> None:
        bar.close()
        _announce(server, settings, json, quiet)

    with bar:
        done = run_server(lambda: make_repository(folder, asked, limits), settings, say)
    _leave(done)


def _leave(done: bool) -> None:
    """End now. Python would wait for a thread that loads, for as long as that takes; its cards end with this process."""
    if not done:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


def _announce(server: Server, settings: Settings, json: str | None, quiet: bool) -> None:
    """Where it listens, for programs and for people."""
    host, http, grpc = settings.host, server.http_port, server.grpc_port
    if json:
        write_json({"host": host, "http_port": http, "grpc_port": grpc, "pid": os.getpid()}, json)
    if json != "-" and not quiet:
        scheme = "http" if settings.secrets.certificate is None else "https"
        console().print(f"ready: {scheme}://{host}:{http}  grpc {host}:{grpc}", markup=False)


def _holds_cards() -> bool:
    """Under torchrun, all hosts but the first hold cards for it; this returns when it has ended."""
    from thermocline.serve.remote.rendezvous import hosts_asked_for

    if hosts_asked_for()[0] == 0:
        return False
    from thermocline.serve import hold_cards

    hold_cards()
    return True


@app.command(epilog="Example:  thermocline serve inspect checkpoint --cards 4 --split feature")
def inspect(
    folder: Checkpoint,
    cards: Count = 4,
    split: Split = SplitName.hash,
    plan: PlanFile = None,
    heat: HeatFile = None,
    device: On = DeviceName.cpu,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show which card would hold what, without loading it."""
    from thermocline.serve.server.model_loader import describe

    with at_work(quiet, f"reading {folder}"):
        found = describe(_cards(cards, split, plan, heat, device).arrangement(folder))
    if json:
        write_json(found, json)
    if json != "-" and not quiet:
        _print(found)


def _print(found: Any) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from thermocline.report.numbers import count, size

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("table", "rows", "dim", "split", "copied", *(f"card {card}" for card in range(found["cards"]))):
        drawn.add_column(name, justify="left" if name in ("table", "split") else "right")
    for each in found["tables"]:
        numbers = (str(count(rows)) for rows in each["places_of_card"])
        copied = str(count(each["copied_rows"]))
        drawn.add_row(escape(each["table"]), str(count(each["rows"])), str(each["dim"]), each["split"], copied, *numbers)
    drawn.add_row("bytes", "", "", "", "", *(str(size(bytes)) for bytes in found["bytes_of_card"]))
    console().print(drawn)


def _cards(count: int, split: SplitName, plan: Path | None, heat: Path | None, device: DeviceName) -> Cards:
    from thermocline.serve.server.model_loader import Cards

    if (split is SplitName.plan) != (plan is not None):
        raise BadInput("--split plan needs --plan PLAN, and --plan is for --split plan only")
    return Cards(count, split.value, plan, heat, device.value)


def _secrets(token_file: Path | None, certificate: Path | None, key: Path | None) -> Secrets:
    from thermocline.serve.server.auth import Secrets

    if (certificate is None) != (key is None):
        raise BadInput("TLS needs both --tls-cert and --tls-key")
    token = None if token_file is None else token_file.read_text(encoding="utf-8").strip()
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise BadInput(f"'{token_file}' must hold one word of plain letters, the token")
    return Secrets(token, certificate, key)
