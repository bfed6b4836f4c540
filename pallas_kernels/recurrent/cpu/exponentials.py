"""Exponentials of numbers that are not positive, for functions compiled by numba."""

from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import vectors
from pallas_kernels.cpu.instruction import instruction
from pallas_kernels.cpu.registers import REGISTER
from pallas_kernels.recurrent.xla.exponentials import COEFFICIENTS, LEAST, ROUNDER


@instruction(REGISTER, REGISTER)
def exp2_of_negative(builder: Any, x: Any) -> Any:
    """2^x, as the function of that name in `pallas_kernels.recurrent.xla.exponentials`."""
    x = builder.select(builder.fcmp_ordered(">", x, _all(LEAST)), x, _all(LEAST))
    shifted = builder.fadd(x, _all(ROUNDER))
    fraction = builder.fsub(x, builder.fsub(shifted, _all(ROUNDER)))
    value = _all(COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        value = vectors.multiply_add(builder, value, fraction, _all(coefficient))
    shift = ir.Constant(vectors.WORDS, [23] * vectors.LANES)
    exponent = builder.shl(builder.bitcast(shifted, vectors.WORDS), shift)
    return builder.bitcast(builder.add(builder.bitcast(value, vectors.WORDS), exponent), vectors.FLOATS)


def _all(value: float) -> Any:
    return ir.Constant(vectors.FLOATS, [float(np.float32(value))] * vectors.LANES)
