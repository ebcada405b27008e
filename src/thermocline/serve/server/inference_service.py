"""The desk: where requests of both protocols become the same thing. It finds the model, checks the request, waits for its
batch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple

from thermocline import __version__
from thermocline.errors import BadInput
from thermocline.serve.errors import NotReady
from thermocline.serve.protocol.tensors import Array, Asked

from .dynamic_batcher import Ticket
from .error_mapping import Refusal, refusal
from .limits import Limits
from .metrics import Histogram, Metrics
from .model_repository import Repository, Served

NAME = "thermocline"
EXTENSIONS = ("binary_tensor_data", "model_repository", "statistics")
NEVER = math.inf


class Answer(NamedTuple):
    """A request's outputs and the version they all come from."""

    asked: Asked
    version: str
    outputs: Mapping[str, Array]
    ticket: Ticket
    served: Served


class Desk:
    """Everything a protocol needs to answer."""

    def __init__(self, repository: Repository, limits: Limits, metrics: Metrics) -> None:
        self.repository, self.limits, self.metrics = repository, limits, metrics

    async def answer(self, asked: Asked, deadline: float = NEVER) -> Answer:
        """Look up what is asked for."""
        self._check_goes_on()
        served = self.repository.served(asked.model, asked.version)
        ids = served.signature.check(asked.inputs, asked.outputs, self.limits.ids)
        ticket = Ticket(asked.inputs, ids, deadline)
        outputs = served.lane.at_once(ticket)
        if outputs is None:
            outputs = await served.lane.ask(ticket)
        version = served.version_of(outputs)
        if asked.outputs:
            absent = [name for name in asked.outputs if name not in outputs]
            if absent:
                raise BadInput(f"output {absent[0]!r} is asked for, but none of its inputs came")
            outputs = {name: outputs[name] for name in asked.outputs}
        return Answer(asked, version, outputs, ticket, served)

    def _check_goes_on(self) -> None:
        if self.repository.draining:
            raise NotReady("the server is shutting down; ask another, or try again")

    def note(self, answer: Answer, started: float, done: float, written: float) -> None:
        """Count an answered request: when its bytes were there, when it was answered, when that was written."""
        ticket = answer.ticket
        self.metrics.of(answer.asked.model).note_answer(
            ticket.arrived - started, ticket.left - ticket.arrived, ticket.done - ticket.left, written - ticket.done, ticket.ids
        )

    def refuse(self, model: str, error: Exception) -> Refusal:
        """Count and word an error."""
        said = refusal(error)
        # A name that no model has is the client's: counting by it would let clients grow the table.
        known = model if model in self.metrics.models else ""
        self.metrics.of(known).refused[said.code] += 1
        return said

    @property
    def refused(self) -> int:
        """Requests that were, so far."""
        return sum(sum(model.refused.values()) for model in self.metrics.models.values())

    # -- what is asked about, not of, models --

    def server_metadata(self) -> dict[str, Any]:
        return {"name": NAME, "version": __version__, "extensions": list(EXTENSIONS)}

    def model_metadata(self, name: str, version: str) -> dict[str, Any]:
        served = self.repository.served(name, version)
        model = served.model
        tensors = {
            which: [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in infos]
            for which, infos in (("inputs", model.inputs), ("outputs", model.outputs))
        }
        return {"name": name, "versions": [served.version], "platform": NAME, **tensors}

    def model_ready(self, name: str, version: str) -> bool:
        """UnknownModel if there is none."""
        if self.repository.draining:
            return False
        try:
            model = self.repository.served(name, version).model
        except NotReady:
            return False
        return all(card.ready for card in model.cards())

    def server_ready(self) -> bool:
        return self.repository.ready

    def statistics(self, name: str, version: str) -> dict[str, Any]:
        """Counts and nanoseconds, as the statistics extension has them."""
        served = [self.repository.served(name, version)] if name else self.repository.all_served()
        return {"model_stats": [self._statistics_of(one) for one in served]}

    def _statistics_of(self, served: Served) -> dict[str, Any]:
        seen = self.metrics.of(served.model.name)
        stages = seen.stages
        failed = sum(seen.refused.values())
        return {
            "name": served.model.name,
            "version": served.version,
            "last_inference": int(seen.last * 1000),
            "inference_count": seen.answered,
            "execution_count": sum(seen.batches.values()),
            "inference_stats": {
                "success": _duration(stages["all"]),
                "fail": {"count": failed, "ns": 0},
                "queue": _duration(stages["queue"]),
                "compute_input": _duration(stages["read"]),
                "compute_infer": _duration(stages["infer"]),
                "compute_output": _duration(stages["write"]),
            },
            "batch_stats": [
                {"batch_size": size, "compute_infer": {"count": count}} for size, count in sorted(seen.batches.items())
            ],
        }

    def index(self, only_ready: bool) -> list[dict[str, str]]:
        return [
            {"name": one.name, "version": one.version, "state": one.state, "reason": one.reason}
            for one in self.repository.index(only_ready)
        ]

    async def load(self, name: str, config: str | None) -> None:
        self._check_goes_on()  # else it would end when that is loaded
        await self.repository.load(name, _version_of(config))


def _duration(histogram: Histogram) -> dict[str, int]:
    return {"count": histogram.count, "ns": int(histogram.total * 1e9)}


def _version_of(config: str | None) -> str:
    """The one version that a load request's `config` names, in the words of Triton's version policy; empty for the newest."""
    if not config:
        return ""
    try:
        policy = json.loads(config).get("version_policy") or {}
        versions = (policy.get("specific") or {}).get("versions") or []
        (version,) = versions or [""]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise BadInput(
            'config may hold {"version_policy": {"specific": {"versions": [N]}}} with one N, and nothing else is read'
        ) from error
    return str(version)


def now() -> float:
    """The clock of deadlines and stages."""
    return perf_counter()
