"""An exchange on a GPU is the definition: a few launches a part, beside messages that take longer."""

from .reference import copy_rows, distinct_rows, offsets, pack_gradients, pack_rows, route, unpack_gradients, unpack_rows

__all__ = [
    "copy_rows", "distinct_rows", "offsets", "pack_gradients", "pack_rows", "route", "unpack_gradients", "unpack_rows",
]  # fmt: skip
