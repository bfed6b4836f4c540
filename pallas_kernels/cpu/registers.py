"""Registers of 16 float32 as values of functions compiled by numba: what `vectors` builds, by name.

A kernel then reads like its formula, `multiply_add(decay, load(at), added)`, and every value in it stays in
a register. Only for arguments and variables of functions that numba compiles.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.datamodel.registry import register_default

from pallas_kernels.cpu import vectors
from pallas_kernels.cpu.instruction import instruction
from pallas_kernels.cpu.memory import INT32

BYTES = vectors.LANES * 4


class _Register(types.Type):
    def __init__(self) -> None:
        super().__init__(name="sixteen_float32")


REGISTER = _Register()


@register_default(_Register)
class _RegisterModel(PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, vectors.FLOATS)


@instruction(REGISTER, types.int64)
def load(builder: Any, address: Any) -> Any:
    """16 float32 that lie one after another."""
    return vectors.load_floats(builder, address)


@instruction(types.void, types.int64, REGISTER)
def store(builder: Any, address: Any, value: Any) -> None:
    """16 float32 to where they lie one after another."""
    vectors.store_floats(builder, value, address)


@instruction(REGISTER, types.int64)
def load_bfloat16(builder: Any, address: Any) -> Any:
    """16 bfloat16 that lie one after another, as float32."""
    return vectors.load_bfloat16(builder, address)


@instruction(types.void, types.int64, REGISTER)
def store_bfloat16(builder: Any, address: Any, value: Any) -> None:
    """16 float32 rounded to bfloat16, one after another."""
    halves = ir.VectorType(ir.IntType(16), vectors.LANES)
    bits = builder.lshr(_rounded(builder, value), _words(16))
    builder.store(builder.trunc(bits, halves), builder.inttoptr(address, halves.as_pointer()), align=2)


@instruction(REGISTER, types.int64)
def load_low_halves(builder: Any, address: Any) -> Any:
    """The bfloat16 in the low halves of 16 words, as float32."""
    return vectors.low_halves(builder, vectors.load_words(builder, address))


@instruction(REGISTER, types.int64)
def load_high_halves(builder: Any, address: Any) -> Any:
    """The bfloat16 in the high halves of 16 words, as float32."""
    return vectors.high_halves(builder, vectors.load_words(builder, address))


@instruction(types.void, types.int64, REGISTER, REGISTER)
def store_halves(builder: Any, address: Any, low: Any, high: Any) -> None:
    """16 words of two bfloat16 each, rounded."""
    low = builder.lshr(_rounded(builder, low), _words(16))
    words = builder.or_(low, builder.and_(_rounded(builder, high), _words(0xFFFF0000)))
    builder.store(words, builder.inttoptr(address, vectors.WORDS.as_pointer()), align=4)


@instruction(REGISTER, types.float32)
def splat(builder: Any, value: Any) -> Any:
    """One number in all lanes."""
    return vectors.splat(builder, value)


@instruction(REGISTER, types.int64)
def load_splat(builder: Any, address: Any) -> Any:
    """The float32 at an address in all lanes."""
    return vectors.load_splat(builder, address)


@instruction(REGISTER, REGISTER, REGISTER)
def add(builder: Any, a: Any, b: Any) -> Any:
    """a + b"""
    return builder.fadd(a, b)


@instruction(REGISTER, REGISTER, REGISTER)
def subtract(builder: Any, a: Any, b: Any) -> Any:
    """a - b"""
    return builder.fsub(a, b)


@instruction(REGISTER, REGISTER, REGISTER)
def multiply(builder: Any, a: Any, b: Any) -> Any:
    """a * b"""
    return builder.fmul(a, b)


@instruction(REGISTER, REGISTER, REGISTER, REGISTER)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return vectors.multiply_add(builder, a, b, c)


@instruction(REGISTER, REGISTER, types.int64)
def first_lanes(builder: Any, value: Any, count: Any) -> Any:
    """The first `count` lanes, 0 in all others."""
    index = ir.Constant(vectors.WORDS, list(range(vectors.LANES)))
    undefined = ir.Constant(vectors.WORDS, ir.Undefined)
    limit = builder.insert_element(undefined, builder.trunc(count, INT32), INT32(0))
    limit = builder.shuffle_vector(limit, undefined, _words(0))
    return builder.select(builder.icmp_signed("<", index, limit), value, vectors.ZEROS)


@instruction(types.float32, REGISTER)
def sum_of_lanes(builder: Any, value: Any) -> Any:
    """The sum of all lanes, in one order on every processor."""
    return vectors.sum_of_lanes(builder, value)


def _words(value: int) -> Any:
    return ir.Constant(vectors.WORDS, [value] * vectors.LANES)


def _rounded(builder: Any, value: Any) -> Any:
    """Words whose high halves are the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, vectors.WORDS)
    odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
    near = builder.add(bits, builder.add(odd, _words(0x7FFF)))
    return builder.select(builder.fcmp_unordered("uno", value, value), bits, near)


@instruction(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Asks for the line at an address to come to the second cache."""
    vectors.prefetch(builder, address)
