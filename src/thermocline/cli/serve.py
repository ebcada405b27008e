"""`thermocline serve`: tables of a checkpoint over several shards, behind the Open Inference Protocol."""

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
    from thermocline.serve.server.config import Credentials, ServerConfig
    from thermocline.serve.server.model_loader import ShardConfig
    from thermocline.serve.server.server import InferenceServer

app = typer.Typer(
    help="Serve the tables of a checkpoint over several shards.",
    epilog="Example:  thermocline serve run checkpoint --shards 4",
    no_args_is_help=True,
)


class SplitName(str, Enum):
    """How rows are split over shards."""

    hash = "hash"
    range = "range"
    feature = "feature"
    plan = "plan"


def _renamed(value: str | None) -> None:
    if value is not None:
        raise BadInput(f"--cards is now --shards: use --shards {value}", parameter="--cards", value=value)


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder of checkpoints.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint.")]
Count = Annotated[int, typer.Option("--shards", min=1, help="Number of shards: processes on a CPU, or GPUs.")]
OldCount = Annotated[str | None, typer.Option("--cards", hidden=True, callback=_renamed, help="Renamed to --shards.")]
Split = Annotated[SplitName, typer.Option("--split", help="How rows are split over shards.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="The plan.json for --split plan.")]
HeatFile = Annotated[Path | None, typer.Option("--heat", metavar="FILE.tc", help="The heat file that the plan was made with.")]
On = Annotated[DeviceName, typer.Option("--device", help="Device of the shards.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on (0.0.0.0: all addresses).")]
HttpPort = Annotated[int, typer.Option("--http-port", min=0, max=65_535, help="Port for HTTP (0 picks a free port).")]
GrpcPort = Annotated[int, typer.Option("--grpc-port", min=0, max=65_535, help="Port for gRPC (0 picks a free port).")]
Follow = Annotated[float, typer.Option("--follow", min=0.0, help="Seconds between checks for newer saves (0: never).")]
Wait = Annotated[float, typer.Option("--wait", min=0.0, help="Maximum queue delay of a batch, in milliseconds.")]
Queue = Annotated[int, typer.Option("--queue", min=1, help="Maximum number of queued requests; more are refused.")]
MaxIds = Annotated[int, typer.Option("--max-ids", min=1, help="Maximum number of ids in one request.")]
MaxMessage = Annotated[int, typer.Option("--max-message", min=1, help="Maximum size of one request, in MiB.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="File with the bearer token that clients must send.")
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="TLS certificate (PEM); needs --tls-key.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Key of the TLS certificate (PEM).")]


@app.command(epilog="Example:  thermocline serve run checkpoint --shards 4 --grpc-port 8001")
def run(
    folder: Folder,
    shards: Count = 4,
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
    cards: OldCount = None,
) -> None:
    """Serve over gRPC and HTTP until SIGTERM or Ctrl-C, with /metrics and a status page at /. Logs are JSON lines on standard
    error.

    Under `torchrun --nproc-per-node 1`, shards are spread over its hosts: the first is the front end, FOLDER is on all of them.

    With --json, the addresses are written when the server is ready.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's errors are raised, and need not be printed as well
    # Before torch is loaded. A second thread for one lookup costs more than it saves while requests run in parallel.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if _runs_shard_host():
        return
    config = _shard_config(shards, split, plan, heat, device)
    credentials = _credentials(token_file, tls_cert, tls_key)
    try:
        from thermocline.serve.server.config import ServerConfig, ServerLimits
        from thermocline.serve.server.json_log import write_to_stderr
        from thermocline.serve.server.model_loader import make_repository
        from thermocline.serve.server.server import run as run_server
    except ModuleNotFoundError as error:
        raise BadInput(f"the server needs {error.name}: pip install 'thermocline[serve]'") from error

    limits = ServerLimits(message=max_message << 20, ids=max_ids, queue=queue, wait=wait / 1000)
    server_config = ServerConfig(host, http_port, grpc_port, credentials, limits, follow)
    write_to_stderr(quiet)

    bar = ExitStack()
    bar.enter_context(progress_bar(quiet))(0, 1, "loading")

    def ready(server: InferenceServer) -> None:
        bar.close()
        _announce(server, server_config, json, quiet)

    with bar:
        done = run_server(lambda: make_repository(folder, config, limits), server_config, ready)
    _exit(done)


def _exit(done: bool) -> None:
    """Exit without waiting for a thread that still loads, as Python would. Its shards end with this process."""
    if not done:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


def _announce(server: InferenceServer, config: ServerConfig, json: str | None, quiet: bool) -> None:
    host, http, grpc = config.host, server.http_port, server.grpc_port
    if json:
        write_json({"host": host, "http_port": http, "grpc_port": grpc, "pid": os.getpid()}, json)
    if json != "-" and not quiet:
        scheme = "http" if config.credentials.certificate is None else "https"
        console().print(f"ready: {scheme}://{host}:{http}  grpc {host}:{grpc}", markup=False)


def _runs_shard_host() -> bool:
    """Under torchrun, hold shards on all hosts but the first, until the server ends. False on the first host."""
    from thermocline.serve.remote.rendezvous import host_rank_and_count

    if host_rank_and_count()[0] == 0:
        return False
    from thermocline.serve import run_shard_host

    run_shard_host()
    return True


@app.command(epilog="Example:  thermocline serve inspect checkpoint --shards 4 --split feature")
def inspect(
    folder: Checkpoint,
    shards: Count = 4,
    split: Split = SplitName.hash,
    plan: PlanFile = None,
    heat: HeatFile = None,
    device: On = DeviceName.cpu,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
    cards: OldCount = None,
) -> None:
    """Show the rows and bytes of each shard, without loading the checkpoint."""
    from thermocline.serve.server.model_loader import describe

    with at_work(quiet, f"reading {folder}"):
        found = describe(_shard_config(shards, split, plan, heat, device).layout(folder))
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
    for name in ("table", "rows", "dim", "split", "copied", *(f"shard {shard}" for shard in range(found["cards"]))):
        drawn.add_column(name, justify="left" if name in ("table", "split") else "right")
    for each in found["tables"]:
        numbers = (str(count(rows)) for rows in each["places_of_card"])
        copied = str(count(each["copied_rows"]))
        drawn.add_row(escape(each["table"]), str(count(each["rows"])), str(each["dim"]), each["split"], copied, *numbers)
    drawn.add_row("bytes", "", "", "", "", *(str(size(bytes)) for bytes in found["bytes_of_card"]))
    console().print(drawn)


def _shard_config(count: int, split: SplitName, plan: Path | None, heat: Path | None, device: DeviceName) -> ShardConfig:
    from thermocline.serve.server.model_loader import ShardConfig

    if (split is SplitName.plan) != (plan is not None):
        raise BadInput("--split plan needs --plan PLAN, and --plan is for --split plan only", parameter="--plan")
    return ShardConfig(count, split.value, plan, heat, device.value)


def _credentials(token_file: Path | None, certificate: Path | None, key: Path | None) -> Credentials:
    from thermocline.serve.server.config import Credentials

    if (certificate is None) != (key is None):
        raise BadInput("TLS needs both --tls-cert and --tls-key", parameter="--tls-cert")
    token = None if token_file is None else token_file.read_text(encoding="utf-8").strip()
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise BadInput(f"'{token_file}' must hold the token: one word of printable ASCII", path=token_file)
    return Credentials(token, certificate, key)
