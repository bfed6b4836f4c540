"""Explicit vectors of 16 float32 for kernels that keep sums in registers, where numba's own loops would not.

For what `pallas_kernels.cpu.instruction` builds. LLVM lowers the vectors to whatever the processor has: one
AVX-512 register, two of AVX, four of NEON. `multiply_add` rounds once, so results do not depend on the width.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pallas_kernels.cpu.memory import INT32, INT64

LANES = 16
FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(INT32, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)


def at(builder: Any, address: Any, offset: int) -> Any:
    """An address some bytes on."""
    return builder.add(address, INT64(offset)) if offset else address


def load_floats(builder: Any, address: Any) -> Any:
    """16 float32 from an address of any alignment to 4."""
    return builder.load(builder.inttoptr(address, FLOATS.as_pointer()), align=4)


def store_floats(builder: Any, value: Any, address: Any) -> None:
    """16 float32 to an address of any alignment to 4."""
    builder.store(value, builder.inttoptr(address, FLOATS.as_pointer()), align=4)


def load_words(builder: Any, address: Any) -> Any:
    """16 uint32 from an address of any alignment to 4."""
    return builder.load(builder.inttoptr(address, WORDS.as_pointer()), align=4)


def load_bfloat16(builder: Any, address: Any) -> Any:
    """16 bfloat16 that lie one after another, as float32."""
    halves = builder.load(builder.inttoptr(address, _HALVES.as_pointer()), align=2)
    return low_halves(builder, builder.zext(halves, WORDS))


def low_halves(builder: Any, words: Any) -> Any:
    """The bfloat16 in the low halves of 16 words, as float32."""
    return builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * LANES)), FLOATS)


def high_halves(builder: Any, words: Any) -> Any:
    """The bfloat16 in the high halves of 16 words, as float32."""
    return builder.bitcast(builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES)), FLOATS)


def splat(builder: Any, value: Any) -> Any:
    """A float32 in all 16 lanes."""
    undefined = ir.Constant(FLOATS, ir.Undefined)
    vector = builder.insert_element(undefined, value, INT32(0))
    return builder.shuffle_vector(vector, undefined, ir.Constant(WORDS, [0] * LANES))


def load_splat(builder: Any, address: Any) -> Any:
    """The float32 at an address in all 16 lanes."""
    return splat(builder, builder.load(builder.inttoptr(address, ir.FloatType().as_pointer()), align=4))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    function_type = ir.FunctionType(FLOATS, [FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.v{LANES}f32")
    return builder.call(fma, [a, b, c])


def constant(value: float) -> Any:
    """A number known when compiling, as float32 in all 16 lanes."""
    return ir.Constant(FLOATS, [value] * LANES)


def polynomial(builder: Any, x: Any, coefficients: Sequence[float]) -> Any:
    """The polynomial of 16 float32 with such coefficients, the constant one first."""
    value = constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = multiply_add(builder, value, x, constant(coefficient))
    return value


def sum_of_lanes(builder: Any, vector: Any) -> Any:
    """The sum of 16 lanes, halves added to halves: the same order on every processor."""
    return fold_lanes(builder, vector, builder.fadd)


def fold_lanes(builder: Any, vector: Any, both: Callable[[Any, Any], Any]) -> Any:
    """One number of 16 lanes: `both(half, other half)` of vectors until one lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        order = [(i + width) % LANES if i < width else i for i in range(LANES)]
        moved = builder.shuffle_vector(vector, vector, ir.Constant(WORDS, order))
        vector = both(vector, moved)
    return builder.extract_element(vector, INT32(0))


def prefetch(builder: Any, address: Any) -> None:
    """Asks for the line at an address to come to the second cache, whatever is there."""
    byte = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, byte), INT32(0), INT32(2), INT32(1)])


def loop(
    builder: Any, stop: Any, step: int, start: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """What `body(index, values)` makes of values, for index 0, step, ... below stop; runs at least once."""
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    index.add_incoming(INT64(0), before)
    values = []
    for value in start:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        values.append(phi)
    new = body(index, list(values))
    following = builder.add(index, INT64(step))
    index.add_incoming(following, builder.block)
    for phi, value in zip(values, new, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, stop), loop, done)
    builder.position_at_end(done)
    return new
