"""Sampling parameters of running requests as arrays, so that a step gathers them with a few numpy calls."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from jaxkv.engine.sampling_params import SamplingParams


class SamplingTable:
    """One row a running request, numbered as in the request table. A row whose epoch differs from the request
    table's belongs to an earlier tenant and is filled when its new one is first scheduled.
    """

    def __init__(self, num_rows: int = 16) -> None:
        self._epoch: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.temperature: NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.top_k: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.top_p: NDArray[np.float32] = np.ones(num_rows, np.float32)
        self.seed: NDArray[np.uint32] = np.zeros(num_rows, np.uint32)
        self.wants_logprobs: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)

    def refresh(
        self,
        rows: NDArray[np.int32],
        epochs: NDArray[np.int64],
        params_of: Callable[[int], SamplingParams],
    ) -> None:
        """Fills the rows whose tenant changed; `params_of(i)` gives the parameters of the i-th of `rows`,
        with a seed.
        """
        if len(rows) and rows.max() >= len(self._epoch):
            self._grow(int(rows.max()) + 1)
        for i in np.flatnonzero(self._epoch[rows] != epochs).tolist():
            row = rows[i]
            params = params_of(i)
            self._epoch[row] = epochs[i]
            self.temperature[row] = params.temperature
            self.top_k[row] = params.top_k
            self.top_p[row] = params.top_p
            self.seed[row] = params.seed or 0
            self.wants_logprobs[row] = params.logprobs is not None

    def _grow(self, num_rows: int) -> None:
        extra = max(num_rows, 2 * len(self._epoch)) - len(self._epoch)
        for name in ("_epoch", "temperature", "top_k", "top_p", "seed", "wants_logprobs"):
            setattr(self, name, np.pad(getattr(self, name), (0, extra)))
