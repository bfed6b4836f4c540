"""Products of bfloat16 that lie in pairs, one word each: by an instruction made for them, where there is one.

AVX-512's (`vdpbf16ps`) adds both products of a pair to a sum and does 32 of them in the time of 16 of
float32. Elsewhere two multiply-adds of float32 do: the second of a pair first, as the instruction does; its
sums differ by rounding, so an answer depends on the processor, but never on what stands beside it.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features

from pallas_kernels.cpu import vectors


class _Bfloat16(ir.Type):
    """LLVM's type, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_PAIRS = ir.VectorType(_Bfloat16(), 2 * vectors.LANES)
_INSTRUCTION = "llvm.x86.avx512bf16.dpbf16ps.512"


def has(feature: str) -> bool:
    """Whether numba compiles for a processor with a feature, by LLVM's name of it."""
    chosen = getattr(config, "CPU_FEATURES", None)  # by a variable of the environment
    return f"+{feature}" in (get_host_cpu_features() if chosen is None else chosen).split(",")


def has_instruction() -> bool:
    """Whether one instruction multiplies and adds pairs."""
    return has("avx512bf16")


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """c plus both products of a's and b's pairs, lane by lane; a and b hold words as 16 float32."""
    if has_instruction():
        function_type = ir.FunctionType(vectors.FLOATS, [vectors.FLOATS, _PAIRS, _PAIRS])
        product = cgutils.get_or_insert_function(builder.module, function_type, _INSTRUCTION)
        return builder.call(product, [c, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)])
    a, b = builder.bitcast(a, vectors.WORDS), builder.bitcast(b, vectors.WORDS)
    for half in (vectors.high_halves, vectors.low_halves):
        c = vectors.multiply_add(builder, half(builder, a), half(builder, b), c)
    return c
