"""Kernels of the row exchange between ranks (definition: `reference.py`).

    distinct_rows       distinct rows of a batch
    route               destination ranks of rows, and the order of rows in a message
    offsets             byte offsets of rows in a message
    pack_rows           rows of an arena to a message
    copy_rows           rows of one message to another
    unpack_rows         rows of a message to fp32 rows
    pack_gradients      gradients to a message
    unpack_gradients    a message to gradients

`implementation_for("exchange", tensor)` returns the module for the device of a tensor.
"""
