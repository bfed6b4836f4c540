"""What an operation that writes and attends returns."""

from typing import NamedTuple

import jax


class AttentionResult(NamedTuple):
    """The tokens' outputs `[T, Hq, Dv]`, 0 for padding tokens, and the pool with the step's K and V."""

    out: jax.Array
    pages: jax.Array
