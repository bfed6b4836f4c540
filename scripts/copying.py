"""What the benchmarks on a CPU hold their times against: the bandwidth of its memory."""

import time

import jax
import jax.numpy as jnp

BYTES = 128 << 20


class Copying:
    """Adding 1 to an array in place, as XLA does it on all threads."""

    def __init__(self) -> None:
        self._add = jax.jit(lambda x: x + 1, donate_argnums=0)
        self._array = self._add(jnp.zeros(BYTES // 4, jnp.float32))

    def __call__(self) -> float:
        """Seconds of one time."""
        start = time.perf_counter()
        self._array = jax.block_until_ready(self._add(self._array))
        return time.perf_counter() - start


def bandwidth(seconds: float) -> float:
    """Bytes a second, read and written ones together, of `Copying` that took so long."""
    return 2 * BYTES / seconds
