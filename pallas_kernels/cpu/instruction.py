"""Functions for numba's to call: compiled for nobody else, or given as LLVM instructions."""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from numba import njit, types
from numba.extending import intrinsic

compiled: Any = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)  # pyright: ignore[reportCallIssue]
"""Compiles a function that only numba's own functions call: without wrappers, a fifth of the time."""


def instruction(result: types.Type, *operands: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Turns `build(builder, *values)`, which appends LLVM instructions, into a function for numba's.

    result, operands: numba's types of what it gives and of what it takes; what `build` returns for
    `types.void` is ignored. The function can only be called from functions compiled by numba.
    """

    def wrap(build: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            built = build(builder, *values)
            return context.get_dummy_value() if result == types.void else built

        def typed(typing_context: Any, *given: Any) -> Any:
            return result(*operands), generate

        # numba counts an intrinsic's parameters by its signature and takes no starred ones.
        names = ["typing_context", *(f"operand_{index}" for index in range(len(operands)))]
        kind = Parameter.POSITIONAL_OR_KEYWORD
        typed.__signature__ = Signature([Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        typed.__name__ = build.__name__
        typed.__doc__ = build.__doc__
        return intrinsic(typed)

    return wrap
