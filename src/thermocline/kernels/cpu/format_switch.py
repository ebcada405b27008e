"""Choose a compiled function by the format of a row, at run time: one LLVM switch."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vectors import kind_of


def by_format(make: Callable[[int], Any], formats: Iterable[int], signature: str) -> Any:
    """An intrinsic that calls `make(format)(*arguments)`.

    Args:
        make: returns the `@helper` of a format; all of them return the same type.
        formats: formats that occur; any other is undefined behaviour.
        signature: types of the arguments after the format, as in `block`.
    """
    functions, kinds = {format: make(format) for format in formats}, tuple(map(kind_of, signature.split()))

    def typing(context, *_):
        for function in functions.values():
            function.compile(kinds)
        compiled = {format: function.overloads[kinds] for format, function in functions.items()}
        result = next(iter(compiled.values())).signature.return_type

        def lower(context, builder, _, arguments):
            out = cgutils.alloca_once(builder, context.get_value_type(result))
            end, unknown = builder.append_basic_block("end"), builder.append_basic_block("unknown_format")
            switch = builder.switch(arguments[0], unknown)
            for format, function in compiled.items():
                case = builder.append_basic_block(f"format_{format}")
                switch.add_case(context.get_constant(types.int64, format), case)
                builder.position_at_end(case)
                context.active_code_library.add_linking_library(function.library)
                value = context.call_internal(builder, function.fndesc, function.signature, arguments[1:])
                builder.store(value, out)
                builder.branch(end)
            builder.position_at_end(unknown)
            builder.unreachable()
            builder.position_at_end(end)
            return builder.load(out)

        return result(types.int64, *kinds), lower

    names = ["context", "format", *(f"a{i}" for i in range(len(kinds)))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(typing)
