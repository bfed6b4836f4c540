"""The words of a convolution's state in VMEM, as the inputs they hold: rows of 128 channels."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.tpu.slabs import pack_rows, unpack_rows
from pallas_kernels.recurrent.tpu.support import is_packed


@dataclass(frozen=True, kw_only=True)
class ConvWords:
    """Of `before` inputs of `lines` rows of 128 channels each, oldest first. packed: two elements a word:
    of two inputs if `before` is even, else of the two halves of an input's channels.
    """

    before: int
    lines: int
    packed: bool

    @classmethod
    def of(cls, place: StatePlace) -> "ConvWords":
        """Those of a part `[C, K - 1]`."""
        channels, before = place.shape
        return cls(before=before, lines=channels // LANES, packed=is_packed(place))

    def inputs(self, words: Any) -> list[jax.Array]:
        """The inputs, float32 `[lines, 128]` each, in `words` `uint32[rows, 128]`."""
        rows = self._run
        runs = [
            unpack_rows(words[first : first + rows], self.packed, half)
            for first in range(0, words.shape[0], rows)
            for half in range(2 if self.packed else 1)
        ]
        if not self.halves:
            return runs
        return [jnp.concatenate(runs[first : first + 2]) for first in range(0, len(runs), 2)]

    def store(self, inputs: list[jax.Array], words: Any) -> None:
        """The inverse of `inputs`."""
        rows, halves = self._run, 2 if self.packed else 1
        runs = [x[first : first + rows] for x in inputs for first in range(0, self.lines, rows)]
        for index in range(0, len(runs), halves):
            first = index // halves * rows
            words[first : first + rows] = pack_rows(runs[index : index + halves], self.packed)

    @property
    def halves(self) -> bool:
        """Whether a word holds two channels of one input."""
        return self.packed and self.before % 2 == 1

    @property
    def _run(self) -> int:
        """Rows of words with one run of elements, or two of them."""
        return self.lines // 2 if self.halves else self.lines
