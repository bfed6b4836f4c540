"""What every recurrent operation is called with, and its two halves put together."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.tpu.schedule import merge


class Step(NamedTuple):
    """The pool, a step's sequences, their states, and where those are. `interpret` is `pallas_call`'s."""

    pages: jax.Array
    batch: RaggedBatch
    table: StateTable
    place: StatePlace
    interpret: Any

    def run(
        self, decode: Callable[["Step"], StepResult], prefill: Callable[["Step"], StepResult]
    ) -> StepResult:
        """The results of `decode` `[S, ...]` and, where there may be any, of `prefill` `[T, ...]`."""
        decoded, pages = decode(self)
        prefilled = None
        if not self.batch.decode_only:
            prefilled, pages = prefill(self._replace(pages=pages))
        return StepResult(merge(decoded, prefilled, self.batch), pages)
