"""Sampling parameters of running requests as arrays, so that a step gathers them with a few numpy calls."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.arrays import grown
from jaxkv.engine.sampling_params import MAX_BANNED_TOKENS, SamplingParams


class RowSampling(NamedTuple):
    """What sampling needs to know of a request. params: with a seed. first_end: the position, counted from
    the prompt's first token, before which none of `end_tokens` may be chosen.
    """

    params: SamplingParams
    first_end: int
    end_tokens: tuple[int, ...]


class SamplingTable:
    """One row a running request, numbered as in the request table. A row whose epoch differs from the request
    table's belongs to an earlier tenant and is filled when its new one is first scheduled.

    end_tokens: int32[rows, MAX_BANNED_TOKENS], of which num_end_tokens[rows] count, must not be chosen for a
    position below first_end; first_end is 0 where there is no such position.
    """

    def __init__(self, num_rows: int = 16) -> None:
        self._epoch: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.temperature: NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.top_k: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.top_p: NDArray[np.float32] = np.ones(num_rows, np.float32)
        self.seed: NDArray[np.uint32] = np.zeros(num_rows, np.uint32)
        self.wants_logprobs: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.first_end: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_end_tokens: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.end_tokens: NDArray[np.int32] = np.zeros((num_rows, MAX_BANNED_TOKENS), np.int32)

    def refresh(
        self,
        rows: NDArray[np.int32],
        epochs: NDArray[np.int64],
        sampling_of: Callable[[int], RowSampling],
    ) -> None:
        """Fills the rows whose tenant changed; `sampling_of(i)` tells about the i-th of `rows`."""
        if len(rows) and rows.max() >= len(self._epoch):
            self._grow(int(rows.max()) + 1)
        for i in np.flatnonzero(self._epoch[rows] != epochs).tolist():
            row = rows[i]
            params, first_end, end_tokens = sampling_of(i)
            self._epoch[row] = epochs[i]
            self.temperature[row] = params.temperature
            self.top_k[row] = params.top_k
            self.top_p[row] = params.top_p
            self.seed[row] = params.seed or 0
            self.wants_logprobs[row] = params.logprobs is not None
            self.first_end[row] = first_end
            self.num_end_tokens[row] = len(end_tokens)
            self.end_tokens[row, : len(end_tokens)] = end_tokens

    def _grow(self, num_rows: int) -> None:
        num_rows = max(num_rows, 2 * len(self._epoch))
        for name, array in list(vars(self).items()):
            setattr(self, name, grown(array, (num_rows, *array.shape[1:])))
