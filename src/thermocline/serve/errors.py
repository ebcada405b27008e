"""What can go wrong with a request that is nobody's mistake, or the server's state's.

    ThermoclineError
    ├── BadInput
    │   └── UnknownModel      no such model or version here
    └── ServeError
        ├── Overloaded        the queue is full: come back later
        ├── CardDown          the card that holds the rows is being restarted
        ├── NotReady          the model is loading, or the server is on its way out
        └── TooLate           the deadline passed, or the client left, before any work was done

Each knows how the two protocols say it (`serve.front.refusals`). All but `UnknownModel` may succeed when tried again.
"""

from __future__ import annotations

from thermocline.errors import BadInput, ThermoclineError


class UnknownModel(BadInput):
    """No such model or version here."""


class ServeError(ThermoclineError):
    """A request that was right and still cannot be answered now."""


class Overloaded(ServeError):
    """The queue is full."""


class CardDown(ServeError):
    """A card that holds rows of the request does not answer."""

    def __init__(self, card: int, detail: str = "") -> None:
        super().__init__(f"card {card} is down{f' ({detail})' if detail else ''}; it is being restarted, try again")
        self.card, self.detail = card, detail

    def __reduce__(self) -> tuple[type[CardDown], tuple[int, str]]:
        return type(self), (self.card, self.detail)  # errors of card processes are sent to the front


class NotReady(ServeError):
    """The model is loading, or the server is on its way out."""


class TooLate(ServeError):
    """The deadline passed before any work was done."""
