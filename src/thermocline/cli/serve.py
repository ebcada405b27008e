"""`thermocline serve`: tables of a checkpoint over several shards, behind the Open Inference Protocol."""

from __future__ import annotations

import atexit
import json as encoding
import os
import ssl
import sys
from contextlib import ExitStack
from datetime import datetime, timezone
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import typer
from rich import box
from rich.text import Text

from thermocline.errors import BadInput, write_text

from .options import Debug, DeviceName, Json, Page, Quiet, command_group
from .output import at_work, console, deliver, print_table, progress_bar

if TYPE_CHECKING:
    from thermocline.serve.server.config import Credentials, ServerConfig
    from thermocline.serve.server.model_loader import ShardConfig
    from thermocline.serve.server.server import InferenceServer

app = command_group("Serve the tables of a checkpoint over several shards.", "thermocline serve run checkpoint --shards 4")


SplitName = Literal["hash", "range", "feature", "plan"]
STATUS_SECONDS = 20.0  # to wait for the reply of a server


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
PublishPort = Annotated[
    int | None,
    typer.Option("--publish-port", min=0, max=65_535, help="Port for trainers that publish rows (0 picks a free port)."),
]
SharedMemory = Annotated[
    str | None,
    typer.Option("--shared-memory", metavar="PREFIX", help="Take tensors from shared memory whose name begins with PREFIX."),
]
Fronts = Annotated[int, typer.Option("--fronts", min=1, help="Number of processes that answer clients; they share the rows.")]
Wait = Annotated[float, typer.Option("--wait", min=0.0, help="Maximum queue delay of a batch, in milliseconds.")]
Queue = Annotated[int, typer.Option("--queue", min=1, help="Maximum number of queued requests; more are refused.")]
MaxIds = Annotated[int, typer.Option("--max-ids", min=1, help="Maximum number of ids in one request.")]
MaxMessage = Annotated[
    int | None, typer.Option("--max-message", min=1, help="Maximum size of one request, in MiB (default: from --max-ids).")
]
MaxResponse = Annotated[int, typer.Option("--max-response", min=1, help="Maximum size of one response, in MiB.")]
MaxInFlight = Annotated[
    int, typer.Option("--max-in-flight", min=1, help="Maximum size of all requests and responses in memory, in MiB.")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="File with the bearer token that clients must send.")
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="TLS certificate (PEM); needs --tls-key.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Key of the TLS certificate (PEM).")]


TlsClientCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca", metavar="FILE", envvar="THERMOCLINE_TLS_CA",
        help="CA (PEM): clients must have a certificate of it; so must other hosts of this server.",
    ),
]  # fmt: skip
ControlToken = Annotated[
    Path | None,
    typer.Option(
        "--control-token-file", metavar="FILE", help="File with the token for load and unload, if not that of clients."
    ),
]
ModelControl = Annotated[
    Literal["explicit", "none"], typer.Option("--model-control", help="Whether clients may load and unload models.")
]
AllowHost = Annotated[list[str] | None, typer.Option("--allow-host", help="A host name of this server (may be repeated).")]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        metavar="FILE",
        envvar="THERMOCLINE_SECRET_FILE",
        help="File with the secret of all hosts of a server, and of trainers.",
    ),
]


@app.command(epilog="Example:  thermocline serve run checkpoint --shards 4 --grpc-port 8001")
def run(
    folder: Folder,
    shards: Count = 4,
    split: Split = "hash",
    plan: PlanFile = None,
    heat: HeatFile = None,
    device: On = "cpu",
    host: Host = "127.0.0.1",
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    follow: Follow = 0.0,
    publish_port: PublishPort = None,
    fronts: Fronts = 1,
    shared_memory: SharedMemory = None,
    wait: Wait = 0.0,
    queue: Queue = 1024,
    max_ids: MaxIds = 1 << 18,
    max_message: MaxMessage = None,
    max_response: MaxResponse = 32,
    max_in_flight: MaxInFlight = 512,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    control_token_file: ControlToken = None,
    model_control: ModelControl = "explicit",
    allow_host: AllowHost = None,
    secret_file: SecretFile = None,
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
    credentials = _credentials(token_file, tls_cert, tls_key, tls_client_ca, control_token_file)
    _describe_hosts(secret_file, credentials)
    if _runs_shard_host(folder):
        return
    config = _shard_config(shards, split, plan, heat, device)
    from thermocline.serve.server.config import ServerConfig, ServerLimits

    limits = ServerLimits(
        max_ids, message=max_message and max_message << 20, response=max_response << 20, queue=queue, wait=wait / 1000,
        in_flight=max_in_flight << 20,
    )  # fmt: skip
    server_config = ServerConfig(
        host, http_port, grpc_port, credentials, limits,
        follow, model_control == "explicit", publish_port, tuple(allow_host or ()), shared_memory, fronts
    )  # fmt: skip
    _exit(_serve(folder, config, server_config, json, quiet))


def _serve(folder: Path, config: ShardConfig, server_config: ServerConfig, json: str | None, quiet: bool) -> bool:
    """Run the server until a signal. Returns whether all its threads have ended."""
    try:
        from thermocline.serve.server.json_log import log, write_to_stderr
        from thermocline.serve.server.model_loader import make_repository
        from thermocline.serve.server.server import run as run_server
    except ModuleNotFoundError as error:
        raise BadInput(f"the server needs {error.name}: pip install 'thermocline[serve]'") from error
    write_to_stderr(quiet)
    bar = ExitStack()
    bar.enter_context(progress_bar(quiet))(0, 1, "loading")

    def ready(server: InferenceServer) -> None:
        bar.close()
        try:
            _announce(server, server_config, json, quiet)
        except (OSError, BadInput) as error:  # a full disk, or a closed pipe: the server runs on
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the end of the process would fail to flush the other
            log("the addresses could not be written", WARNING, error=str(error))

    with bar:
        return run_server(lambda: make_repository(folder, config, server_config.limits), server_config, ready)


def _exit(done: bool) -> None:
    """Exit without waiting for a thread that still loads, as Python would. Its shards end with this process."""
    if not done:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


def _announce(server: InferenceServer, config: ServerConfig, json: str | None, quiet: bool) -> None:
    host, http, grpc = config.host, server.http_port, server.grpc_port
    publish = server.publish_port
    found = {"host": host, "http_port": http, "grpc_port": grpc, "publish_port": publish, "pid": os.getpid()}
    with deliver(found, json, quiet) as shown:
        if shown:
            scheme = "http" if config.credentials.certificate is None else "https"
            also = "" if publish is None else f"  publish {host}:{publish}"
            console().print(f"ready: {scheme}://{host}:{http}  grpc {host}:{grpc}{also}", markup=False)


def _runs_shard_host(folder: Path) -> bool:
    """Under torchrun, hold shards on all hosts but the first, until the server ends. False on the first host."""
    from thermocline.serve.remote.rendezvous import host_rank_and_count

    if host_rank_and_count()[0] == 0:
        return False
    from thermocline.serve import run_shard_host

    run_shard_host(folder)
    return True


@app.command(epilog="Example:  thermocline serve inspect checkpoint --shards 4 --split feature")
def inspect(
    folder: Checkpoint,
    shards: Count = 4,
    split: Split = "hash",
    plan: PlanFile = None,
    heat: HeatFile = None,
    device: On = "cpu",
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
    cards: OldCount = None,
) -> None:
    """Show the rows and bytes of each shard, without loading the checkpoint."""
    from thermocline.serve.server.model_loader import describe

    with at_work(quiet, f"reading {folder}"):
        found = describe(_shard_config(shards, split, plan, heat, device).layout(folder))
    with deliver(found, json, quiet) as shown:
        if shown:
            _print(found)


def _print(found: Any) -> None:
    from thermocline.report.numbers import count, size

    rows = []
    for each in found["tables"]:
        numbers = (str(count(rows)) for rows in each["places_of_card"])
        copied = str(count(each["copied_rows"]))
        rows.append((each["table"], str(count(each["rows"])), str(each["dim"]), each["split"], copied, *numbers))
    rows.append(("bytes", "", "", "", "", *(str(size(bytes)) for bytes in found["bytes_of_card"])))
    heads = ("table", "rows", "dim", "split", "copied", *(f"shard {shard}" for shard in range(found["cards"])))
    print_table(heads, rows, ("table", "split"), box=box.SIMPLE_HEAD)


def _shard_config(count: int, split: SplitName, plan: Path | None, heat: Path | None, device: DeviceName) -> ShardConfig:
    from thermocline.serve.server.model_loader import ShardConfig

    if (split == "plan") != (plan is not None):
        raise BadInput("--split plan needs --plan PLAN, and --plan is for --split plan only", parameter="--plan")
    return ShardConfig(count, split, plan, heat, device)


def _credentials(
    token_file: Path | None, certificate: Path | None, key: Path | None, client_ca: Path | None, control_token_file: Path | None
) -> Credentials:
    from thermocline.serve.server.config import Credentials

    if (certificate is None) != (key is None):
        raise BadInput("TLS needs both --tls-cert and --tls-key", parameter="--tls-cert")
    if client_ca is not None and certificate is None:
        raise BadInput("--tls-client-ca needs --tls-cert and --tls-key", parameter="--tls-client-ca")
    return Credentials(_token(token_file), certificate, key, client_ca, _token(control_token_file))


def _token(file: Path | None) -> str | None:
    token = None if file is None else file.read_text(encoding="utf-8").strip()
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise BadInput(f"'{file}' must hold the token: one word of printable ASCII", path=file)
    return token


def _describe_hosts(secret_file: Path | None, credentials: Credentials) -> None:
    """Hand the secret and the certificates to the processes' rendezvous, which reads the environment, as torchrun's does."""
    given = {"SECRET_FILE": secret_file}
    if credentials.client_ca is not None:
        given |= {"TLS_CERT": credentials.certificate, "TLS_KEY": credentials.key, "TLS_CA": credentials.client_ca}
    os.environ |= {f"THERMOCLINE_{name}": str(path) for name, path in given.items() if path is not None}


@app.command(epilog="Example:  thermocline serve status http://127.0.0.1:8000 --report serving.html")
def status(
    address: Annotated[str, typer.Argument(metavar="URL", help="HTTP address of a running server.")],
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with the bearer token of the server.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option("--tls-ca", metavar="FILE", help="Certificate (PEM) of an https server.")
    ] = None,
    report: Page = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show load, latency and shards of a running server. The exit code is 1 unless all models and shards are ready."""
    from thermocline.report.numbers import count, seconds, size

    url = (address if "://" in address else f"http://{address}").rstrip("/")
    with at_work(quiet, f"reading {url}"):
        found = _fetch(url, token_file, tls_ca)
    ready = found["state"] == "ready"
    with deliver({name: value for name, value in found.items() if name != "html"}, json, quiet and ready) as shown:
        if shown:
            rate = f"{count(round(found['requests_per_second']))} requests a second"
            latency = f"p50 {seconds(found['p50'])}, p99 {seconds(found['p99'])}"
            console().print(f"{found['state']}: {rate}, {latency}, {found['refused']:,} failed", markup=False)
            rows = []
            for model in found["models"]:
                for shard in model["cards"]:
                    state = "ready" if shard["ready"] else Text("down", style="bold red")
                    numbers = str(size(shard["bytes"])), str(count(shard["lookups"])), f"{model['imbalance']:.3f}"
                    rows.append((model["name"], model["version"], f"shard {shard['number']}", state, *numbers))
            heads = ("model", "version", "shard", "state", "rows", "lookups", "imbalance")
            print_table(heads, rows, heads[:4], box=box.SIMPLE_HEAD)
        if report:
            from thermocline.serve.server.status_page import status_report  # deferred: draws charts

            write_text(report, status_report(found, url, f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"))
    if not ready:
        raise typer.Exit(1)


def _fetch(url: str, token_file: Path | None, tls_ca: Path | None) -> dict[str, Any]:
    headers = {} if token_file is None else {"Authorization": f"Bearer {token_file.read_text(encoding='utf-8').strip()}"}
    trusted = HTTPSHandler(context=ssl.create_default_context(cafile=None if tls_ca is None else str(tls_ca)))
    opener = build_opener(ProxyHandler({}), trusted)  # proxies of the environment do not apply
    try:
        with opener.open(Request(f"{url}/status.json", headers=headers), timeout=STATUS_SECONDS) as answer:
            found: Any = encoding.load(answer)
    except HTTPError as error:
        way_out = "; give --token-file" if error.code == 401 else ""
        raise BadInput(f"{url} returned {error.code} {error.reason}{way_out}", parameter="URL", value=error.code) from None
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        way_out = "is it the HTTP address of a `thermocline serve run`?"
        if isinstance(reason, ssl.SSLCertVerificationError):
            way_out = "give the server's certificate: --tls-ca FILE"
        raise BadInput(f"{url} has no status: {reason}; {way_out}", parameter="URL") from None
    if not isinstance(found, dict) or "rates" not in found:
        raise BadInput(f"{url}/status.json is not the status of a thermocline server of this version", parameter="URL")
    return dict(found)
