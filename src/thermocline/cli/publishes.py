"""`thermocline serve publishes`, `rollback` and `resume`: the publishes of a running server, over its publish port."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thermocline.errors import BadInput

from .options import Debug, Json, Quiet
from .output import at_work, console, deliver

LIST = "Example:  thermocline serve publishes localhost:8002 --secret-file secret"
ROLL_BACK = "Example:  thermocline serve rollback localhost:8002 --to 118 --secret-file secret"
RESUME = "Example:  thermocline serve resume localhost:8002 --secret-file secret"
_SECONDS, _MAX_REPLY = 600.0, 1 << 20  # `resume` loads a checkpoint

Address = Annotated[str, typer.Argument(metavar="HOST:PORT", help="The --publish-port of a running server.")]
To = Annotated[
    int | None, typer.Option("--to", min=0, help="A publish that `serve publishes` lists as kept (default: the one before).")
]
Model = Annotated[str, typer.Option("--model", help="Model on the server.")]
SecretFile = Annotated[
    Path | None,
    typer.Option("--secret-file", metavar="FILE", envvar="THERMOCLINE_SECRET_FILE", help="File with the secret of the server."),
]


def show(
    address: Address, model: Model = "tables", secret_file: SecretFile = None, json: Json = None, quiet: Quiet = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Show which publish a running server serves, and to which it can return."""
    _tell(_ask(address, {"do": "status", "model": model}, secret_file, quiet), json, quiet)


def roll_back(
    address: Address, to: To = None, model: Model = "tables", secret_file: SecretFile = None, json: Json = None,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Serve an earlier publish, and refuse later ones until `serve resume`."""
    _tell(_ask(address, {"do": "roll back", "model": model, "to": to}, secret_file, quiet), json, quiet)


def resume(
    address: Address, model: Model = "tables", secret_file: SecretFile = None, json: Json = None, quiet: Quiet = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Load the checkpoint folder with its log again, and take publishes from then on."""
    _tell(_ask(address, {"do": "resume", "model": model}, secret_file, quiet), json, quiet)


def _ask(address: str, message: dict[str, Any], secret_file: Path | None, quiet: bool) -> dict[str, Any]:
    from thermocline.serve.remote.rendezvous import read_secret, read_tls
    from thermocline.serve.remote.session import connect, read_address

    at, secret = read_address(address), read_secret(secret_file)
    with at_work(quiet, f"asking {address}"):
        try:
            session = connect(at, secret, read_tls(), 10.0)
            try:
                session.settimeout(_SECONDS)
                session.send(message)
                reply = session.receive(_MAX_REPLY)[0]
            finally:
                session.close()
        except (OSError, EOFError) as error:
            words = f"{address} does not answer: {error}; is it the --publish-port of a server with this secret?"
            raise BadInput(words, parameter="HOST:PORT", value=address) from None
    if "refused" in reply:
        raise BadInput(reply["error"], parameter="HOST:PORT", value=address)
    return reply


def _tell(found: dict[str, Any], json: str | None, quiet: bool) -> None:
    with deliver(found, json, quiet) as shown:
        if shown:
            kept = ", ".join(map(str, found["kept"])) or "none"
            state = "held" if found["held"] else "following its trainer"
            console().print(f"publish {found['number']} of run {found['run']}, {state}; kept: {kept}", markup=False)
