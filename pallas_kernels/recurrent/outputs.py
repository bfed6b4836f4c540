"""What a recurrent operation returns."""

from typing import NamedTuple

import jax


class StepResult(NamedTuple):
    """The tokens' outputs, 0 for padding tokens, and the pool with the step's states written."""

    out: jax.Array
    pages: jax.Array
