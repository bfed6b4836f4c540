"""Exponentials of numbers that are not positive, for functions compiled by numba."""

from typing import Any

from llvmlite import ir

from pallas_kernels.cpu import vectors
from pallas_kernels.cpu.instruction import instruction
from pallas_kernels.cpu.registers import REGISTER
from pallas_kernels.recurrent.xla.exponentials import COEFFICIENTS, LEAST, ROUNDER


@instruction(REGISTER, REGISTER)
def exp2_of_negative(builder: Any, x: Any) -> Any:
    """2^x, as the function of that name in `pallas_kernels.recurrent.xla.exponentials`."""
    x = builder.select(builder.fcmp_ordered(">", x, vectors.constant(LEAST)), x, vectors.constant(LEAST))
    shifted = builder.fadd(x, vectors.constant(ROUNDER))
    fraction = builder.fsub(x, builder.fsub(shifted, vectors.constant(ROUNDER)))
    value = vectors.polynomial(builder, fraction, COEFFICIENTS)
    shift = ir.Constant(vectors.WORDS, [23] * vectors.LANES)
    exponent = builder.shl(builder.bitcast(shifted, vectors.WORDS), shift)
    return builder.bitcast(builder.add(builder.bitcast(value, vectors.WORDS), exponent), vectors.FLOATS)
