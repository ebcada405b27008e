"""The inference service: requests and queries of both protocols, independent of their encoding."""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from thermocline import __version__
from thermocline.errors import BadInput
from thermocline.serve.errors import DeadlineExceeded, NotAllowed, NotReady, Overloaded, ShardDown, UnknownModel
from thermocline.serve.protocol.shared_memory import SharedRegions
from thermocline.serve.protocol.tensors import Array, InferRequest
from thermocline.serve.served_model import TensorMetadata

from .config import ServerConfig
from .dynamic_batcher import QueuedRequest
from .in_flight import ByteBudget, GrpcCalls
from .json_log import log_fault
from .metrics import LatencyHistogram, MetricsHistory
from .model_repository import ModelRepository, ServedVersion
from .status_page import status_json, status_page

NAME = "thermocline"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
NO_DEADLINE = math.inf
MAX_MESSAGE = 800  # characters of an error: gRPC sends it in a header, whose size clients limit
_DURATIONS = {"success": "all", "queue": "queue", "compute_input": "read", "compute_infer": "infer", "compute_output": "write"}
# gRPC code and HTTP status; the first match counts. Any other error is a fault of the server.
_STATUS: tuple[tuple[type[Exception], str, int], ...] = (
    (UnknownModel, "NOT_FOUND", 404),
    (NotAllowed, "PERMISSION_DENIED", 403),
    (BadInput, "INVALID_ARGUMENT", 400),
    (Overloaded, "RESOURCE_EXHAUSTED", 429),
    (ShardDown, "UNAVAILABLE", 503),
    (NotReady, "UNAVAILABLE", 503),
    (DeadlineExceeded, "DEADLINE_EXCEEDED", 504),
)


class ErrorStatus(NamedTuple):
    """The name of a gRPC code, an HTTP status, and a message."""

    code: str
    http: int
    message: str


def is_token(authorization: str | bytes, token: str) -> bool:
    """Whether an `authorization` header has a token, in a time that tells nothing about it."""
    given = authorization if isinstance(authorization, bytes) else authorization.encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def error_status(error: Exception) -> ErrorStatus:
    """How both protocols report an error. The traceback of a fault goes to the log, and the client learns only its type."""
    for kind, code, http in _STATUS:
        if isinstance(error, kind):
            message = str(error)
            return ErrorStatus(code, http, message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "...")
    log_fault("a request failed", error)
    return ErrorStatus("INTERNAL", 500, f"a fault of the server ({type(error).__name__}); see its log")


class InferResult(NamedTuple):
    """Outputs of a request, and the one version that they come from."""

    version: str
    outputs: Mapping[str, Array]
    queued: QueuedRequest


class InferenceService:
    """Everything that a protocol needs to answer its clients."""

    def __init__(self, repository: ModelRepository, config: ServerConfig) -> None:
        self.repository, self.metrics = repository, repository.metrics
        self.limits, self.history = config.limits, MetricsHistory(self.metrics)
        limits = self.limits
        self._clients_control, self._control_token = config.clients_control, config.credentials.control_token
        self.regions = SharedRegions(config.shared_memory)
        self.budget = ByteBudget(limits.in_flight)
        self.calls = GrpcCalls(self.budget, limits, self.metrics.dropped)
        self.metrics.in_flight = lambda: self.budget.held

    def find(self, request: InferRequest) -> ServedVersion:
        """The model version of a request. Raises `NotReady` or `UnknownModel`."""
        self._check_not_draining()
        return self.repository.served(request.model, request.version)

    def in_use(self, model: str) -> ServedVersion | None:
        """The version in use of a model, if it may be asked."""
        return None if self.repository.draining else self.repository.in_use(model)

    async def infer(
        self,
        request: InferRequest,
        served: ServedVersion,
        received: float,
        take: Callable[[int], None],
        remaining: float = NO_DEADLINE,
    ) -> InferResult:
        """Execute a request, at once if its model is idle, else in a batch. `take` takes the bytes of its outputs before.

        It may wait for the `remaining` seconds of its call, and for its own timeout, from when it was received.
        """
        deadline = received + min(remaining, request.timeout)
        ids, size = served.signature.check(request.inputs, request.outputs, self.limits.request)
        take(size)
        queued, batcher = QueuedRequest(request.inputs, ids, deadline), served.batcher
        if batcher.is_idle(ids):
            (outputs,) = batcher.execute((queued,))
            if isinstance(outputs, Exception):
                raise outputs
        else:
            outputs = await batcher.enqueue(queued)
        version = getattr(outputs, "version", None) or served.version
        if request.outputs and hasattr(outputs, "only"):
            outputs = outputs.only(request.outputs)
        elif request.outputs:
            if missing := [name for name in request.outputs if name not in outputs]:
                raise BadInput(f"output {missing[0]!r} is requested, but its input is not there", parameter=missing[0])
            outputs = {name: outputs[name] for name in request.outputs}
        take(max(0, sum([array.nbytes for array in outputs.values()]) - size))
        return InferResult(version, outputs, queued)

    def _check_not_draining(self) -> None:
        if self.repository.draining:
            raise NotReady("the server is shutting down; ask another, or try again")

    def record(self, model: str, result: InferResult, received: float, written: float) -> None:
        """Count a successful request: when its bytes arrived, and when its response was encoded."""
        at = result.queued
        stages = (at.arrived - received, at.started - at.arrived, at.done - at.started, written - at.done)
        self.metrics.of(model).record(*stages, at.ids)

    def fail(self, model: str, error: Exception) -> ErrorStatus:
        """Count an error, and map it to the protocols."""
        status = error_status(error)
        # Unknown names are counted together: else clients could grow the metrics without limit.
        known = model if model in self.metrics.models else ""
        self.metrics.of(known).failed[status.code] += 1
        return status

    @property
    def failed(self) -> int:
        """Failed requests since the start."""
        return sum(sum(model.failed.values()) for model in self.metrics.models.values())

    # -- metadata, health, statistics, repository --

    def server_metadata(self) -> dict[str, Any]:
        """ServerMetadata of the protocol."""
        shared = ("system_shared_memory",) if self.regions.prefix is not None else ()
        return {"name": NAME, "version": __version__, "extensions": [*EXTENSIONS, *shared]}

    def model_metadata(self, name: str, version: str) -> dict[str, Any]:
        """ModelMetadata of the protocol."""
        served = self.repository.served(name, version)
        inputs, outputs = (
            [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in listed]
            for listed in (served.model.inputs, served.model.outputs)
        )
        return {"name": name, "versions": [served.version], "platform": NAME, "inputs": inputs, "outputs": outputs}

    def model_config(self, name: str, version: str) -> dict[str, Any]:
        """ModelConfig of the model configuration extension, as much as clients need. Models do not batch by a dimension."""
        served = self.repository.served(name, version)
        inputs = [{**_config_of(each), "optional": each.optional} for each in served.model.inputs]
        outputs = [_config_of(each) for each in served.model.outputs]
        return {
            "name": name, "platform": NAME, "backend": NAME, "max_batch_size": 0, "input": inputs, "output": outputs
        }  # fmt: skip

    def model_ready(self, name: str, version: str) -> bool:
        """Whether a model is served and all of its shards are up. Raises `UnknownModel`."""
        if self.repository.draining:
            return False
        try:
            model = self.repository.served(name, version).model
        except NotReady:
            return False
        return all(shard.ready for shard in model.shards())

    async def report(self, what: str, *given: Any) -> Any:
        """What concerns the server as a whole, with all of its front processes: what it says of itself, and shared memory."""
        reports: dict[str, Callable[..., Any]] = {
            "metrics": lambda: self.metrics.text().decode(),
            "status": lambda: status_json(self, self.history),
            "page": lambda: status_page(self, self.history),
            "statistics": self.statistics,
            "index": self.repository.index,
            "regions": self.regions.status,
            "register": self.regions.register,
            "unregister": self.regions.unregister,
        }
        return reports[what](*given)

    def statistics(self, name: str, version: str) -> dict[str, Any]:
        """ModelStatistics of the statistics extension: counts and nanoseconds."""
        served = [self.repository.served(name, version)] if name else self.repository.all_served()
        return {"model_stats": [self._statistics_of(each) for each in served]}

    def _statistics_of(self, served: ServedVersion) -> dict[str, Any]:
        metrics = self.metrics.of(served.model.name)
        durations = {name: _duration(metrics.stages[stage]) for name, stage in _DURATIONS.items()}
        batches = sorted(metrics.batches.items())
        return {
            "name": served.model.name,
            "version": served.version,
            "last_inference": int(metrics.last * 1000),
            "inference_count": metrics.answered,
            "execution_count": sum(metrics.batches.values()),
            "inference_stats": durations | {"fail": {"count": sum(metrics.failed.values()), "ns": 0}},
            "batch_stats": [{"batch_size": size, "compute_infer": {"count": count}} for size, count in batches],
        }

    def check_control(self, authorization: str) -> None:
        """Raise `NotAllowed` unless a request with this `authorization` header may load and unload models."""
        if not self._clients_control:
            words = "loading and unloading are off here: set --token-file or --control-token-file, and --model-control explicit"
            raise NotAllowed(words, parameter="model_control")
        if self._control_token is not None and not is_token(authorization, self._control_token):
            raise NotAllowed("send 'authorization: Bearer TOKEN' with the token of --control-token-file", parameter="token")

    async def load(self, name: str, config: str | None) -> None:
        """RepositoryModelLoad of the model repository extension."""
        self._check_not_draining()  # shutdown does not wait for a load
        await self.repository.load(name, version_of_config(config))

    async def unload(self, name: str) -> None:
        """RepositoryModelUnload of the model repository extension."""
        self.repository.unload(name)


def _config_of(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": f"TYPE_{tensor.datatype}", "dims": list(tensor.shape)}


def _duration(histogram: LatencyHistogram) -> dict[str, int]:
    return {"count": histogram.count, "ns": int(histogram.total * 1e9)}


def version_of_config(config: str | None) -> str:
    """The version that Triton's version policy names in a load request's `config`; empty for the newest."""
    if not config:
        return ""
    try:
        given = json.loads(config)
        policy = given.pop("version_policy", None) or {"latest": {"num_versions": 1}}
        ((kind, fields),) = policy.items()
        if kind == "latest" and fields in ({}, {"num_versions": 1}) and not given:
            return ""
        (version,) = fields["versions"] if kind == "specific" and not given else []
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        words = (
            'config may hold {"version_policy": POLICY} with {"latest": {"num_versions": 1}} or {"specific": {"versions": [N]}}'
        )
        raise BadInput(f"{words}: a model is served in one version at a time", parameter="config") from error
    return str(version)
