"""Row exchange on a GPU: the reference, a few launches for each part beside messages that take longer."""

from .reference import copy_rows, distinct_rows, offsets, pack_gradients, pack_rows, route, unpack_gradients, unpack_rows

__all__ = [
    "copy_rows", "distinct_rows", "offsets", "pack_gradients", "pack_rows", "route", "unpack_gradients", "unpack_rows",
]  # fmt: skip
