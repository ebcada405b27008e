"""Vector code of the CPU kernels, 16 columns at a time. `@block` makes a Numba intrinsic of a function that emits LLVM code.

@block("i64 f32 -> acc1")            types of arguments and result: i64, f32, accN (N vectors held in registers)
def scaled(e, address, factor):      e makes vectors; the body runs once, when Numba compiles
    return [e.load_f32(address) * e.splat(factor)]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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

    def _do(self, other: Vec | float, floats: str, ints: str) -> Vec:
        operation = getattr(self.emit.builder, floats if self.is_float else ints)
        return Vec(self.emit, operation(self.value, self._other(other)))

    def __add__(self, other: Vec | float) -> Vec:
        return self._do(other, "fadd", "add")

    def __sub__(self, other: Vec | float) -> Vec:
        return self._do(other, "fsub", "sub")

    def __mul__(self, other: Vec | float) -> Vec:
        return self._do(other, "fmul", "mul")

    def __truediv__(self, other: Vec | float) -> Vec:
        return self._do(other, "fdiv", "")

    def __and__(self, other: Vec | int) -> Vec:
        return self._do(other, "", "and_")

    def __or__(self, other: Vec | int) -> Vec:
        return self._do(other, "", "or_")

    def __xor__(self, other: Vec | int) -> Vec:
        return self._do(other, "", "xor")

    def __lshift__(self, other: Vec | int) -> Vec:
        return self._do(other, "", "shl")

    def __rshift__(self, other: Vec | int) -> Vec:
        return self._do(other, "", "lshr")

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
        kinds = [a.value.type for a in args]
        fn = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(kinds[0], kinds), name)
        return Vec(self, self.builder.call(fn, [a.value for a in args]))

    def at(self, address: Any, index: Any, size: int = 1) -> Any:
        """address + index * size; index is an i64 or a Python number."""
        if isinstance(index, int):
            return self.builder.add(address, ir.Constant(_I64, index * size)) if index else address
        return self.builder.add(address, self.builder.mul(index, ir.Constant(_I64, size)))

    def _load(self, address: Any, element: ir.Type, count: Any) -> Any:
        kind = _vector(element)
        size = 4 if element == _F32 else element.width // 8
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        if count is None:
            return self.builder.load(pointer, align=size)
        name = f"llvm.masked.load.v16{'f32' if element == _F32 else f'i{element.width}'}.p0"
        kinds = [pointer.type, _I32, _vector(_I1), kind]
        fn = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(kind, kinds), name)
        zeros = ir.Constant(kind, None)
        return self.builder.call(fn, [pointer, ir.Constant(_I32, size), self.first(count), zeros])

    def prefetch(self, address: Any) -> None:
        """Prefetch a cache line into the second level, where a core tracks more outstanding misses than in the first."""
        pointer = self.builder.inttoptr(address, _I8.as_pointer())
        kinds = [pointer.type, _I32, _I32, _I32]
        kind = ir.FunctionType(ir.VoidType(), kinds)
        fn = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(fn, [pointer, ir.Constant(_I32, 0), ir.Constant(_I32, _LOCALITY), ir.Constant(_I32, 1)])

    def load_scalar(self, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, _F32.as_pointer()), align=4)

    def load_word(self, address: Any) -> Any:
        """32 bits zero-extended to i64."""
        return self.widen(self.builder.load(self.builder.inttoptr(address, _I32.as_pointer()), align=4))

    def number(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def mask_bits(self, mask: Any) -> Any:
        """A mask as an i64: bit k is element k."""
        return self.builder.zext(self.builder.bitcast(mask, ir.IntType(WIDTH)), _I64)

    def load_f32(self, address: Any, count: Any = None) -> Vec:
        return Vec(self, self._load(address, _F32, count))

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
        kinds = [value.type, pointer.type, _I32, _vector(_I1)]
        fn = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
        self.builder.call(fn, [value, pointer, ir.Constant(_I32, bits // 8), self.first(count)])


_KINDS = {"i64": types.int64, "f32": types.float32, "none": types.none}


def kind_of(name: str) -> Any:
    return Accumulator(int(name[3:])) if name.startswith("acc") else _KINDS[name]


def block(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Turn a function that emits vector code into a Numba intrinsic of that signature."""
    arguments, result = signature.split("->")
    kinds, kind = [kind_of(a) for a in arguments.split()], kind_of(result.strip())

    def wrap(body: Callable[..., Any]) -> Any:
        def typing(context: Any, *args: Any) -> Any:
            return kind(*kinds), lower

        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit = Emit(builder)
            pairs = zip(args, kinds, strict=True)
            unpacked = [_unpack(emit, a, k) if isinstance(k, Accumulator) else a for a, k in pairs]
            return _pack(context, emit, body(emit, *unpacked), kind)

        names = ["context", *(f"a{i}" for i in range(len(kinds)))]
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
        typing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typing.__name__ = body.__name__
        return intrinsic(typing)

    return wrap


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


@block("i64 -> i64")
def lowest_bit(e: Emit, bits: Any) -> Any:
    """Index of the lowest set bit of a number that is not 0."""
    return e.builder.cttz(bits, ir.Constant(_I1, 1))


@block("i64 -> i64")
def ones(e: Emit, bits: Any) -> Any:
    """Population count."""
    return e.builder.ctpop(bits)


@block("f32 -> i64")
def bits_of(e: Emit, value: Any) -> Any:
    return e.builder.zext(e.builder.bitcast(value, _I32), _I64)


@block("i64 -> f32")
def float_of(e: Emit, bits: Any) -> Any:
    return e.builder.bitcast(e.builder.trunc(bits, _I32), _F32)


@block("i64 -> none")
def prefetch(e: Emit, address: Any) -> None:
    """Prefetch the cache line at an address; an invalid address is harmless."""
    e.prefetch(address)


@block("-> none")
def fence(e: Emit) -> None:
    """Order streamed stores before everything that follows."""
    e.builder.fence("seq_cst")
