"""Whether kernels compiled by numba can run here."""

import importlib.util
import os

import jax


def why_not() -> str | None:
    """Why no kernel compiled by numba can serve this process, or None."""
    if jax.default_backend() != "cpu":
        return f"its kernels run on a CPU, not on {jax.default_backend()}"
    if os.name != "posix":
        return f"its kernels need a POSIX system, not {os.name!r}"
    if importlib.util.find_spec("numba") is None:
        return 'numba is not installed (pip install "jaxkv[cpu]")'
    return None


def multiplies_bfloat16() -> bool:
    """Whether these kernels, where they serve, multiply bfloat16 by an instruction made for it."""
    from pallas_kernels.cpu.bfloat16_pairs import has_instruction

    return has_instruction()
