"""Errors of the server that are not mistakes of its caller, and the one that is.

    ThermoclineError
    ├── BadInput
    │   ├── UnknownModel          the model repository has no such model or version
    │   └── NotAllowed            loading and unloading are off, or need another token
    └── ServeError
        ├── Overloaded            the queue is full
        ├── ShardDown             the shard that holds the rows is being restarted
        ├── NotReady              the model is loading, or the server is shutting down
        └── DeadlineExceeded      the deadline passed before the request was executed

`server/inference_service.py` maps each to a gRPC code and an HTTP status. Every `ServeError` is worth a retry.
"""

from __future__ import annotations

from thermocline.errors import BadInput, ThermoclineError


class UnknownModel(BadInput):
    """The model repository has no such model or version.

    Example::

        try:
            repository.unload("ranking")
        except UnknownModel as error:
            print(error)
    """


class NotAllowed(BadInput):
    """Loading and unloading are off, or need a token that the request lacks."""


class ServeError(ThermoclineError):
    """A valid request that cannot be answered now; a retry may succeed.

    Example::

        try:
            rows = group.lookup({"user": [3, 17]})
        except ServeError as error:
            print(f"try again: {error}")
    """


class Overloaded(ServeError):
    """The queue of a model, or the memory for request bodies, is full.

    Example::

        try:
            rows = group.lookup({"user": [3, 17]})
        except Overloaded:
            time.sleep(0.01)
    """


class ShardDown(ServeError):
    """A shard that holds rows of the request does not respond.

    Attributes:
        shard: number of the shard.
        detail: what is known of the failure, or an empty string.

    Example::

        try:
            rows = group.lookup({"user": [3, 17]})
        except ShardDown as error:
            print(error.shard)
    """

    def __init__(self, shard: int, detail: str = "") -> None:
        super().__init__(f"shard {shard} is down{f' ({detail})' if detail else ''}; it is being restarted, try again")
        self.shard, self.detail = shard, detail

    def __reduce__(self) -> tuple[type[ShardDown], tuple[int, str]]:
        return type(self), (self.shard, self.detail)


class NotReady(ServeError):
    """The model is loading, or the server is shutting down.

    Example::

        try:
            rows = group.lookup({"user": [3, 17]})
        except NotReady:
            print("not serving yet")
    """


class DeadlineExceeded(ServeError):
    """The deadline passed before the request was executed.

    Example::

        try:
            rows = group.lookup({"user": [3, 17]})
        except DeadlineExceeded:
            print("give the request more time")
    """
