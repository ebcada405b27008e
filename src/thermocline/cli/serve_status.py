"""`thermocline serve status`: the state of a running server, and a report of it as one page."""

from __future__ import annotations

import json as encoding
import ssl
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from thermocline.errors import BadInput

from .options import Debug, Json, Page, Quiet
from .output import at_work, console, write_json

EXAMPLE = "Example:  thermocline serve status http://127.0.0.1:8000 --report serving.html"

SECONDS = 20.0  # to wait for the reply


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
    from thermocline.report.numbers import count, seconds

    url = (address if "://" in address else f"http://{address}").rstrip("/")
    with at_work(quiet, f"reading {url}"):
        found = _fetch(url, token_file, tls_ca)
    if json:
        write_json({name: value for name, value in found.items() if name != "html"}, json)
    if report:
        from thermocline.serve.server.status_page import status_report  # deferred: draws charts

        report.write_text(status_report(found, url, f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"), encoding="utf-8")
    ready = found["state"] == "ready"
    if json != "-" and not (quiet and ready):
        rate = f"{count(round(found['requests_per_second']))} requests a second"
        line = (
            f"{found['state']}: {rate}, p50 {seconds(found['p50'])}, p99 {seconds(found['p99'])}, {found['refused']:,} failed"
        )
        console().print(line, markup=False)
        console().print(_table(found))
    if not ready:
        raise typer.Exit(1)


def _fetch(url: str, token_file: Path | None, tls_ca: Path | None) -> dict[str, Any]:
    headers = {} if token_file is None else {"Authorization": f"Bearer {token_file.read_text(encoding='utf-8').strip()}"}
    trusted = HTTPSHandler(context=ssl.create_default_context(cafile=None if tls_ca is None else str(tls_ca)))
    opener = build_opener(ProxyHandler({}), trusted)  # proxies of the environment do not apply
    try:
        with opener.open(Request(f"{url}/status.json", headers=headers), timeout=SECONDS) as answer:
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


def _table(found: dict[str, Any]) -> Table:
    from thermocline.report.numbers import count, size

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "version", "shard", "state", "rows", "lookups", "imbalance"):
        drawn.add_column(name, justify="right" if name in ("rows", "lookups", "imbalance") else "left")
    for model in found["models"]:
        for shard in model["cards"]:
            state = "ready" if shard["ready"] else "[bold red]down[/]"
            numbers = str(size(shard["bytes"])), str(count(shard["lookups"])), f"{model['imbalance']:.3f}"
            drawn.add_row(escape(model["name"]), escape(model["version"]), f"shard {shard['number']}", state, *numbers)
    return drawn
