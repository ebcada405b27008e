"""Vector code of the CPU kernels, 16 columns at a time. `@block` makes a Numba intrinsic of a function that emits LLVM code.

@block("i64 f32 -> acc1")            types of arguments and result: i64, f32, accN (N vectors held in registers)
def scaled(e, address, factor):      e makes vectors; the body runs once, when Numba compiles
    return [e.load_f32(address) * e.splat(factor)]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

WIDTH = 16

_I1, _I8, _I32, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_LOCALITY = 2  # of llvm.prefetch: into the second-level cache (3: into the first)


def _vector(element: ir.Type, width: int = WIDTH) -> ir.VectorType:
    return ir.VectorType(element, width)


class Accumulator(types.Type):  # type: ignore[misc]
    """`count` vectors of 16 floats, as one value that a loop can carry in registers."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Accumulator({count})")


@register_model(Accumulator)
class _AccumulatorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.ArrayType(_vector(_F32), kind.count))


def _operator(floats: str = "", ints: str = "") -> Callable[[Vec, Vec | float], Vec]:
    """An operator of `Vec` that emits one of two instructions."""

    def emit(self: Vec, other: Vec | float) -> Vec:
        operation = getattr(self.emit.builder, floats if self.is_float else ints)
        return Vec(self.emit, operation(self.value, self._other(other)))

    return emit


class Vec:
    """A vector while code is emitted: operators emit instructions. Elements are fp32 or 32-bit integers (logical shifts)."""

    def __init__(self, emit: Emit, value: Any) -> None:
        self.emit, self.value = emit, value

    @property
    def is_float(self) -> bool:
        return isinstance(self.value.type.element, ir.FloatType)

    def _other(self, other: Vec | float) -> Any:
        if isinstance(other, Vec):
            return other.value
        element = self.value.type.element
        if not self.is_float:
            other = int(other) & 0xFFFFFFFF
        return ir.Constant(self.value.type, [ir.Constant(element, other)] * self.value.type.count)

    __add__, __sub__, __mul__ = _operator("fadd", "add"), _operator("fsub", "sub"), _operator("fmul", "mul")
    __truediv__ = _operator("fdiv")
    __and__, __or__, __xor__ = _operator(ints="and_"), _operator(ints="or_"), _operator(ints="xor")
    __lshift__, __rshift__ = _operator(ints="shl"), _operator(ints="lshr")

    def compare(self, sign: str, other: Vec | float) -> Any:
        """A mask. Floats compare ordered (false for NaN), integers signed."""
        builder = self.emit.builder
        call = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return call(sign, self.value, self._other(other))

    def where(self, mask: Any, other: Vec | float) -> Vec:
        """self where the mask is set, else other."""
        return Vec(self.emit, self.emit.builder.select(mask, self.value, self._other(other)))

    def clamp(self, low: float, high: float) -> Vec:
        up = self.where(self.compare(">", low), low)
        return up.where(up.compare("<", high), high)

    def larger(self, other: Vec) -> Vec:
        return self.where(self.compare(">", other), other)

    def smaller(self, other: Vec) -> Vec:
        return self.where(self.compare("<", other), other)

    def bits(self) -> Vec:
        return Vec(self.emit, self.emit.builder.bitcast(self.value, _vector(_I32)))

    def floats(self) -> Vec:
        """The same 32 bits as floats."""
        return Vec(self.emit, self.emit.builder.bitcast(self.value, _vector(_F32)))

    def to_float(self) -> Vec:
        """Signed integers to floats."""
        return Vec(self.emit, self.emit.builder.sitofp(self.value, _vector(_F32)))

    def to_int(self) -> Vec:
        return Vec(self.emit, self.emit.builder.fptosi(self.value, _vector(_I32)))

    def floor(self) -> Vec:
        return self.emit.call("llvm.floor.v16f32", self)

    def sqrt(self) -> Vec:
        return self.emit.call("llvm.sqrt.v16f32", self)

    def shuffle(self, other: Vec, order: Sequence[int]) -> Vec:
        mask = ir.Constant(_vector(_I32, len(order)), [ir.Constant(_I32, i) for i in order])
        return Vec(self.emit, self.emit.builder.shuffle_vector(self.value, other.value, mask))

    def halves(self) -> tuple[Vec, Vec]:
        """Even and odd elements."""
        count = self.value.type.count
        return self.shuffle(self, range(0, count, 2)), self.shuffle(self, range(1, count, 2))

    def fold(self, join: Callable[[Vec, Vec], Vec]) -> Any:
        """Reduce all elements to one scalar by a tree: neighbours in pairs, then the results in pairs, and so on."""
        vec = self
        while vec.value.type.count > 1:
            vec = join(*vec.halves())
        return vec.scalar()

    def scalar(self) -> Any:
        """Element 0."""
        return self.emit.builder.extract_element(self.value, ir.Constant(_I32, 0))


class Emit:
    """Emits vectors, loads and stores. `count` limits loads and stores to the first `count` elements (None: all)."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def splat(self, scalar: Any) -> Vec:
        kind = _vector(scalar.type)
        if isinstance(scalar.type, ir.IntType) and scalar.type.width == 64:
            scalar, kind = self.builder.trunc(scalar, _I32), _vector(_I32)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
        zeros = ir.Constant(_vector(_I32), [ir.Constant(_I32, 0)] * WIDTH)
        return Vec(self, self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros))

    def splat_i64(self, scalar: Any) -> Any:
        """16 64-bit integers, which are no `Vec`."""
        kind, zeros = _vector(_I64), ir.Constant(_vector(_I32), [0] * WIDTH)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def constant(self, values: Sequence[Any]) -> Vec:
        element = _F32 if isinstance(values[0], float) else _I32
        return Vec(self, ir.Constant(_vector(element), [ir.Constant(element, v) for v in values]))

    def zeros(self) -> Vec:
        return self.constant([0.0] * WIDTH)

    def lanes(self) -> Vec:
        return self.constant(list(range(WIDTH)))

    def first(self, count: Any) -> Any:
        """Mask of the first `count` elements (an i64 of any value)."""
        most = ir.Constant(_I64, WIDTH)
        count = self.builder.select(self.builder.icmp_signed("<", count, most), count, most)
        return self.lanes().compare("<", self.splat(count))

    def widen(self, scalar: Any) -> Any:
        """A 32-bit integer zero-extended to i64."""
        return self.builder.zext(scalar, _I64)

    def call(self, name: str, *args: Vec) -> Vec:
        return Vec(self, self.call_llvm(name, args[0].value.type, *(a.value for a in args)))

    def at(self, address: Any, index: Any, size: int = 1) -> Any:
        """address + index * size; index is an i64 or a Python number."""
        if isinstance(index, int):
            return self.builder.add(address, ir.Constant(_I64, index * size)) if index else address
        return self.builder.add(address, self.builder.mul(index, ir.Constant(_I64, size)))

    def call_llvm(self, name: str, kind: ir.Type, *arguments: Any) -> Any:
        """Call an LLVM intrinsic that returns `kind`."""
        function = ir.FunctionType(kind, [a.type for a in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, function, name), arguments)

    def _load(self, address: Any, element: ir.Type, count: Any, mask: Any = None) -> Any:
        kind = _vector(element)
        size = 4 if element == _F32 else element.width // 8
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        if count is None and mask is None:
            return self.builder.load(pointer, align=size)
        if count is not None:
            first = self.first(count)
            mask = first if mask is None else self.builder.and_(first, mask)
        name = f"llvm.masked.load.v16{'f32' if element == _F32 else f'i{element.width}'}.p0"
        return self.call_llvm(name, kind, pointer, ir.Constant(_I32, size), mask, ir.Constant(kind, None))

    def prefetch(self, address: Any) -> None:
        """Prefetch a cache line into the second level, where a core tracks more outstanding misses than in the first."""
        pointer, flags = self.builder.inttoptr(address, _I8.as_pointer()), (0, _LOCALITY, 1)
        self.call_llvm("llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(_I32, flag) for flag in flags))

    def load_scalar(self, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, _F32.as_pointer()), align=4)

    def load_word(self, address: Any) -> Any:
        """32 bits zero-extended to i64."""
        return self.widen(self.builder.load(self.builder.inttoptr(address, _I32.as_pointer()), align=4))

    def number(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def stack(self, words: int) -> Any:
        """The address of memory for `words` 64-bit integers on the stack of the function."""
        return self.builder.ptrtoint(cgutils.alloca_once(self.builder, ir.ArrayType(_I64, words)), _I64)

    def mask_bits(self, mask: Any) -> Any:
        """A mask as an i64: bit k is element k."""
        return self.builder.zext(self.builder.bitcast(mask, ir.IntType(WIDTH)), _I64)

    def load_f32(self, address: Any, count: Any = None, mask: Any = None) -> Vec:
        return Vec(self, self._load(address, _F32, count, mask))

    def load_unsigned(self, address: Any, bits: int, count: Any = None) -> Vec:
        return Vec(self, self.builder.zext(self._load(address, ir.IntType(bits), count), _vector(_I32)))

    def load_signed(self, address: Any, bits: int, count: Any = None) -> Vec:
        return Vec(self, self.builder.sext(self._load(address, ir.IntType(bits), count), _vector(_I32)))

    def stream(self, address: Any, vec: Vec) -> None:
        """Non-temporal store; the address must be a multiple of 64."""
        pointer = self.builder.inttoptr(address, vec.value.type.as_pointer())
        store = self.builder.store(vec.value, pointer, align=64)
        store.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(_I32, 1)]))

    def store(self, address: Any, vec: Vec, bits: int = 32, count: Any = None) -> None:
        """Store floats, or the low `bits` of integers."""
        value = vec.value
        if bits < 32:
            value = self.builder.trunc(value, _vector(ir.IntType(bits)))
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        if count is None:
            self.builder.store(value, pointer, align=bits // 8)
            return
        name = f"llvm.masked.store.v16{'f32' if vec.is_float else f'i{bits}'}.p0"
        self.call_llvm(name, ir.VoidType(), value, pointer, ir.Constant(_I32, bits // 8), self.first(count))


_KINDS = {"i64": types.int64, "f32": types.float32, "none": types.none}


def _kind_of(name: str) -> Any:
    return Accumulator(int(name[3:])) if name.startswith("acc") else _KINDS[name]


def block(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Turn a function that emits vector code into a Numba intrinsic of that signature."""
    arguments, result = signature.split("->")
    kinds, kind = [_kind_of(a) for a in arguments.split()], _kind_of(result.strip())

    def wrap(body: Callable[..., Any]) -> Any:
        def typing(context: Any, *args: Any) -> Any:
            return kind(*kinds), lower

        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit = Emit(builder)
            pairs = zip(args, kinds, strict=True)
            unpacked = [_unpack(emit, a, k) if isinstance(k, Accumulator) else a for a, k in pairs]
            return _pack(context, emit, body(emit, *unpacked), kind)

        typing.__name__ = body.__name__
        return _intrinsic(typing, len(kinds))

    return wrap


def _intrinsic(typing: Any, count: int) -> Any:
    """A Numba intrinsic of `count` arguments."""
    names = ["context", *(f"a{i}" for i in range(count))]
    typing.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])
    return intrinsic(typing)


def by_format(make: Callable[[int], Any], formats: Iterable[int], signature: str) -> Any:
    """An intrinsic that calls `make(format)(*arguments)`, chosen by the format of a row at run time with one LLVM switch.

    `make` returns the `@helper` of a format; all of them return the same type. `signature`: types of the arguments after the
    format, as in `block`. Any other format is undefined behaviour.
    """
    functions, kinds = {format: make(format) for format in formats}, tuple(_kind_of(name) for name in signature.split())

    def typing(context: Any, *_: Any) -> Any:
        for function in functions.values():
            function.compile(kinds)
        compiled = {format: function.overloads[kinds] for format, function in functions.items()}
        result = next(iter(compiled.values())).signature.return_type

        def lower(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
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

    return _intrinsic(typing, 1 + len(kinds))


def _unpack(emit: Emit, value: Any, kind: Accumulator) -> list[Vec]:
    return [Vec(emit, emit.builder.extract_value(value, i)) for i in range(kind.count)]


def _pack(context: Any, emit: Emit, result: Any, kind: Any) -> Any:
    if isinstance(kind, Accumulator):
        value = ir.Constant(ir.ArrayType(_vector(_F32), kind.count), ir.Undefined)
        for i, vec in enumerate(result):
            value = emit.builder.insert_value(value, vec.value, i)
        return value
    if kind is types.none:
        return context.get_dummy_value()
    return result


# -- scalars ----------------------------------------------------------------------------------------------------------


def _element(element: ir.Type, size: int) -> tuple[Any, Any]:
    """(read, write) intrinsics for the i-th element at an address; integers are zero-extended to i64."""
    name = "f32" if element == _F32 else "i64"

    @block(f"i64 i64 -> {name}")
    def read(e: Emit, base: Any, index: Any) -> Any:
        value = e.builder.load(e.builder.inttoptr(e.at(base, index, size), element.as_pointer()), align=size)
        return e.builder.zext(value, _I64) if isinstance(element, ir.IntType) and size < 8 else value

    @block(f"i64 i64 {name} -> none")
    def write(e: Emit, base: Any, index: Any, value: Any) -> None:
        if isinstance(element, ir.IntType) and size < 8:
            value = e.builder.trunc(value, element)
        e.builder.store(value, e.builder.inttoptr(e.at(base, index, size), element.as_pointer()), align=size)

    return read, write


get_i64, put_i64 = _element(_I64, 8)
get_u32, put_u32 = _element(_I32, 4)
get_u8, put_u8 = _element(_I8, 1)
get_f32, put_f32 = _element(_F32, 4)


@block("i64 i64 i64 -> none")
def add_u32(e: Emit, base: Any, index: Any, value: Any) -> None:
    """Atomically add to the i-th word at an address."""
    pointer = e.builder.inttoptr(e.at(base, index, 4), _I32.as_pointer())
    e.builder.atomic_rmw("add", pointer, e.builder.trunc(value, _I32), "monotonic")


@block("i64 i64 -> i64")
def equal_bytes(e: Emit, address: Any, byte: Any) -> Any:
    """Which of the 64 bytes at an address are equal to a byte, one bit each."""
    line = ir.VectorType(_I8, 64)
    found = e.builder.load(e.builder.inttoptr(address, line.as_pointer()), align=1)
    one = e.builder.insert_element(ir.Constant(line, ir.Undefined), e.builder.trunc(byte, _I8), ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, 64), [0] * 64)
    wanted = e.builder.shuffle_vector(one, ir.Constant(line, ir.Undefined), mask)
    return e.builder.bitcast(e.builder.icmp_unsigned("==", found, wanted), _I64)


lowest_bit = block("i64 -> i64")(lambda e, bits: e.builder.cttz(bits, ir.Constant(_I1, 1)))  # its index; bits are not 0
ones = block("i64 -> i64")(lambda e, bits: e.builder.ctpop(bits))
bits_of = block("f32 -> i64")(lambda e, value: e.widen(e.builder.bitcast(value, _I32)))
float_of = block("i64 -> f32")(lambda e, bits: e.builder.bitcast(e.builder.trunc(bits, _I32), _F32))
prefetch = block("i64 -> none")(lambda e, address: e.prefetch(address))  # an invalid address is harmless
fence = block("-> none")(lambda e: e.builder.fence("seq_cst"))  # orders streamed stores before everything that follows
