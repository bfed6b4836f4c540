"""What one step is told: arrays of fixed shape, sent to the device as one buffer of int32 words.

A step has about ten small arrays and a table for every group. Each array sent by itself costs tens of
microseconds, so the host fills views of one buffer (`StepShape.views`) and the jitted step cuts it up again
(`StepShape.unpack`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.engine.buckets import Bucket
from jaxkv.engine.sampler import SamplingRows
from jaxkv.engine.sampling_params import MAX_BANNED_TOKENS
from pallas_kernels.batch import GroupTable, RaggedBatch
from pallas_kernels.recurrent import StateTable


class StepInputs(NamedTuple):
    """The arrays of a step, as the device sees them. T, S: the bucket's tokens and sequences.

    tokens int32[T]: token ids. carried int32[T]: where not negative, the token is not in `tokens` but is the
    one that the step before chose at this index (it never left the device).
    batch, tables: where every token, block and state is; one table a group.
    sampled int32[S]: indices in `tokens` of the positions to choose a next token after, the first
    `num_samples` of them. wants_logprobs int32[]: whether any of them wants log probabilities.
    """

    tokens: jax.Array
    carried: jax.Array
    batch: RaggedBatch
    tables: tuple[GroupTable | StateTable, ...]
    sampled: jax.Array
    num_samples: jax.Array
    wants_logprobs: jax.Array
    sampling: SamplingRows


class BlockTableShape(NamedTuple):
    """The table of a group with blocks. width: the most blocks a sequence holds."""

    width: int

    def fields(self, num_seqs: int) -> dict[str, tuple[int, ...]]:
        """The arrays, all int32, of a table for so many sequences."""
        return {"block_ids": (num_seqs, self.width), "first_block": (num_seqs,)}

    def table(self, arrays: Mapping[str, jax.Array]) -> GroupTable:
        return GroupTable(**arrays)


class StateTableShape(NamedTuple):
    """The table of a group with recurrent states. width: the most states that a step leaves inside a chunk.
    num_blocks: that hold one state.
    """

    width: int
    num_blocks: int

    def fields(self, num_seqs: int) -> dict[str, tuple[int, ...]]:
        """The arrays, all int32, of a table for so many sequences."""
        return {
            "read": (num_seqs, self.num_blocks),
            "write": (num_seqs, self.num_blocks),
            "checkpoint_lens": (num_seqs, self.width),
            "checkpoint": (num_seqs, self.width, self.num_blocks),
        }

    def table(self, arrays: Mapping[str, jax.Array]) -> StateTable:
        return StateTable(**arrays)


TableShape = BlockTableShape | StateTableShape


@dataclass(frozen=True)
class StepShape:
    """A bucket and the shape of each group's table: all that the shapes of a step depend on."""

    bucket: Bucket
    tables: tuple[TableShape, ...]

    @cached_property
    def fields(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype (of four bytes) of every array, in the order of the buffer."""
        tokens, seqs = self.bucket.num_tokens, self.bucket.num_seqs
        fields: dict[str, tuple[tuple[int, ...], str]] = {
            "tokens": ((tokens,), "int32"),
            "carried": ((tokens,), "int32"),
            "positions": ((tokens,), "int32"),
            "seq_ids": ((tokens,), "int32"),
            "query_starts": ((seqs + 1,), "int32"),
            "seq_lens": ((seqs,), "int32"),
            "num_decodes": ((), "int32"),
            "num_seqs": ((), "int32"),
            "sampled": ((seqs,), "int32"),
            "num_samples": ((), "int32"),
            "wants_logprobs": ((), "int32"),
            "temperature": ((seqs,), "float32"),
            "top_k": ((seqs,), "int32"),
            "top_p": ((seqs,), "float32"),
            "uniform": ((seqs,), "float32"),
            "num_banned": ((seqs,), "int32"),
            "banned": ((seqs, MAX_BANNED_TOKENS), "int32"),
        }
        for group, table in enumerate(self.tables):
            for name, shape in table.fields(seqs).items():
                fields[f"{name}.{group}"] = (shape, "int32")
        return fields

    @cached_property
    def num_words(self) -> int:
        return sum(prod(shape) for shape, _ in self.fields.values())

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Every array as a view of `buffer` int32[num_words]."""
        views, offset = {}, 0
        for name, (shape, dtype) in self.fields.items():
            views[name] = buffer[offset : offset + prod(shape)].view(dtype).reshape(shape)
            offset += prod(shape)
        return views

    def unpack(self, buffer: jax.Array) -> StepInputs:
        """The arrays of `buffer` int32[num_words]; for use under jit."""
        arrays, offset = {}, 0
        for name, (shape, dtype) in self.fields.items():
            words = buffer[offset : offset + prod(shape)].reshape(shape)
            arrays[name] = (
                words if dtype == "int32" else jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
            )
            offset += prod(shape)
        batch = ("positions", "seq_ids", "query_starts", "seq_lens", "num_decodes", "num_seqs")
        return StepInputs(
            tokens=arrays["tokens"],
            carried=arrays["carried"],
            batch=RaggedBatch(**{name: arrays[name] for name in batch}, decode_only=self.bucket.decode_only),
            tables=tuple(
                table.table({name: arrays[f"{name}.{group}"] for name in table.fields(self.bucket.num_seqs)})
                for group, table in enumerate(self.tables)
            ),
            sampled=arrays["sampled"],
            num_samples=arrays["num_samples"],
            wants_logprobs=arrays["wants_logprobs"],
            sampling=SamplingRows(**{name: arrays[name] for name in SamplingRows._fields}),
        )
