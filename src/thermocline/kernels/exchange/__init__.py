"""What an exchange of rows between cards does on each card (see `reference.py` for the definition).

    distinct_rows       the rows of a batch, each once
    route               which of them go to which card, in what order
    offsets             where they lie in a message
    pack_rows           from an arena to a message
    copy_rows           from one message to another
    unpack_rows         from a message to where they are looked up
    pack_gradients      their gradients to a message
    unpack_gradients    and back

`implementation_for("exchange", tensor)` is the module that does all this where a tensor lies.
"""
