"""Whether kernels compiled by numba can run here."""

import importlib.util
import os
from functools import cache

import jax


def why_not() -> str | None:
    """Why no kernel compiled by numba can serve this process, or None."""
    if jax.default_backend() != "cpu":
        return f"its kernels run on a CPU, not on {jax.default_backend()}"
    if os.name != "posix":
        return f"its kernels need a POSIX system, not {os.name!r}"
    if importlib.util.find_spec("numba") is None:
        return 'numba is not installed (pip install "jaxkv[cpu]")'
    return _why_numba_fails()


@cache
def _why_numba_fails() -> str | None:
    try:
        from numba.core import config
    except ImportError as error:  # as where numpy is newer than numba knows
        return f"numba cannot be imported: {error}"
    disabled: bool = config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]
    return "NUMBA_DISABLE_JIT is set" if disabled else None


def multiplies_bfloat16() -> bool:
    """Whether these kernels, where they serve, multiply bfloat16 by an instruction made for it."""
    from pallas_kernels.cpu.bfloat16_pairs import has_instruction

    return has_instruction()
