"""Random recurrent steps over a poisoned pool, and what must come out of them."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import RaggedBatch
from pallas_kernels.recurrent import StateLayout, StateTable
from tests.pallas_kernels.recurrent.recurrences import Operation, States, Tokens, normal

GUARD = 0x7FC17FC1  # a NaN as float32, and a pair of NaNs as bfloat16


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """A sequence of a step: tokens before it and in it, and where states are kept inside.

    starts_from_zeros: nothing is read though tokens came before. in_place: it writes the blocks it reads.
    """

    before: int
    new: int
    checkpoints: tuple[int, ...] = ()
    starts_from_zeros: bool = False
    in_place: bool = True


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of `operation` and what must come out of it.

    parts: of the layout, that are the operation's. pages: the pool before; every word but the initial states'
    is NaN. out: `[T, ...]` float64. states: by block ids `[P]`, the parts' values that must be there
    afterwards.
    """

    operation: Operation
    layout: StateLayout
    parts: tuple[int, ...]
    layer_slot: int
    layer_slots: int
    tokens: Tokens
    pages: np.ndarray
    batch: RaggedBatch
    table: StateTable
    out: np.ndarray
    states: dict[tuple[int, ...], States] = field(default_factory=dict)

    @property
    def place(self) -> dict[str, Any]:
        part = {"part": self.parts[0]} if len(self.parts) == 1 else {"parts": self.parts}
        return part | {
            "layout": self.layout,
            "layer_slot": self.layer_slot,
            "layer_slots": self.layer_slots,
        }


def page_of(blocks: tuple[int, ...], page: int, layer_slot: int, layer_slots: int) -> int:
    """Where page number `page` of a layer's state is in the pool."""
    slot = layer_slot + page
    return blocks[slot // layer_slots] * layer_slots + slot % layer_slots


def parts_of(step: Step, pages: np.ndarray, blocks: tuple[int, ...]) -> States:
    """The parts' values in `blocks` of a pool."""
    words = np.concatenate(
        [
            pages[page_of(blocks, k, step.layer_slot, step.layer_slots)].reshape(-1)
            for k in range(step.layout.num_pages)
        ]
    )
    values = step.layout.unpack(jnp.asarray(words))
    return tuple(np.asarray(values[part].astype(jnp.float32)) for part in step.parts)


def put_parts(step: Step, pages: np.ndarray, blocks: tuple[int, ...], parts: States) -> None:
    """Writes the parts' words, and no other, into `blocks` of a pool."""
    values = [jnp.zeros(shape) for shape in step.layout.shapes]
    for part, value in zip(step.parts, parts, strict=True):
        values[part] = jnp.asarray(value)
    words = np.asarray(step.layout.pack(tuple(values)))
    layout = step.layout
    where = [page_of(blocks, k, step.layer_slot, step.layer_slots) for k in range(layout.num_pages)]
    starts = np.array(where) * layout.page_words
    for start, size in (layout.parts[part] for part in step.parts):
        index = np.arange(start, start + size)
        at = starts[index // layout.page_words] + index % layout.page_words
        pages.reshape(-1)[at] = words[index]


def make_step(
    operation: Operation,
    sequences: list[Sequence],
    *,
    dtype: str = "float32",
    conv_dtype: str = "bfloat16",
    page_rows: int = 8,
    beside: tuple[int, ...] = (6, 3),
    part: int = 1,
    layer_slot: int = 1,
    layer_slots: int = 2,
    num_checkpoints: int = 0,
    spare_tokens: int = 0,
    spare_rows: int = 0,
    decode_only: bool = False,
    seed: int = 0,
) -> Step:
    """A step of `sequences`, which come with one-token ones first.

    beside: a bfloat16 part before ours, or (part 0) after it. Where the operation has two parts, the first is
    of `conv_dtype`.
    """
    rng = np.random.default_rng(seed)
    count = len(operation.shapes)
    own = tuple(zip(operation.shapes, (conv_dtype, dtype)[-count:], strict=True))
    both = ((beside, "bfloat16"), *own) if part else (*own, (beside, "bfloat16"))
    shapes, dtypes = (tuple(values) for values in zip(*both, strict=True))
    layout = StateLayout(shapes=shapes, dtypes=dtypes, page_rows=page_rows)
    width = (layer_slot + layout.num_pages - 1) // layer_slots + 1
    rows = len(sequences) + spare_rows
    most = max([num_checkpoints, *(len(s.checkpoints) for s in sequences)])
    num_states = sum(2 + len(s.checkpoints) for s in sequences) + 1
    blocks = (rng.permutation(num_states * width) + 1).reshape(num_states, width).astype(np.int32).tolist()
    pool = ((num_states * width + 1) * layer_slots, page_rows, 128)

    total = sum(s.new for s in sequences)
    tokens = operation.tokens(rng, total + spare_tokens)
    for value in tokens.values():
        value[total:] = np.nan  # a padding token's values reach nothing
    out = None
    read, write = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.int32)
    lens = np.zeros((rows, most), np.int32)
    kept = np.zeros((rows, most, width), np.int32)
    step = Step(
        operation=operation,
        layout=layout,
        parts=tuple(range(part, part + count)),
        layer_slot=layer_slot,
        layer_slots=layer_slots,
        tokens=tokens,
        pages=np.full(pool, GUARD, np.uint32),
        batch=_batch(sequences, rows, total + spare_tokens, decode_only),
        table=StateTable(read=read, write=write, checkpoint_lens=lens, checkpoint=kept),  # type: ignore[arg-type]
        out=np.zeros(0),
    )
    token = 0
    for row, sequence in enumerate(sequences):
        states = tuple(np.zeros(shape) for shape in operation.shapes)
        if not sequence.starts_from_zeros:
            read[row] = blocks.pop()
            values = (jnp.asarray(normal(rng, *shape), stored) for shape, stored in own)
            states = tuple(np.asarray(value.astype(jnp.float32)) for value in values)
            put_parts(step, step.pages, tuple(read[row]), states)
            states = tuple(state.astype(np.float64) for state in states)
        write[row] = read[row] if sequence.in_place and read[row, 0] else blocks.pop()
        for index, position in enumerate(sequence.checkpoints):
            lens[row, index] = position
            kept[row, index] = blocks.pop()
        for position in range(sequence.before, sequence.before + sequence.new):
            states, y = operation.token(
                states, {name: value[token].astype(np.float64) for name, value in tokens.items()}
            )
            out = np.zeros((total + spare_tokens, *y.shape)) if out is None else out
            out[token] = y
            token += 1
            if position + 1 in sequence.checkpoints:
                step.states[tuple(kept[row, sequence.checkpoints.index(position + 1)])] = states
        step.states[tuple(write[row])] = states
    object.__setattr__(step, "out", np.zeros((total + spare_tokens, 1)) if out is None else out)
    return step


def _batch(sequences: list[Sequence], rows: int, num_tokens: int, decode_only: bool) -> RaggedBatch:
    counts = [s.new for s in sequences] + [0] * (rows - len(sequences))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions, seq_ids = np.zeros(num_tokens, np.int32), np.full(num_tokens, rows, np.int32)
    for row, sequence in enumerate(sequences):
        here = slice(starts[row], starts[row + 1])
        positions[here], seq_ids[here] = sequence.before + np.arange(sequence.new), row
    decodes = 0
    while decodes < len(sequences) and sequences[decodes].new == 1:
        decodes += 1
    lens = [s.before + s.new for s in sequences] + [0] * (rows - len(sequences))
    return RaggedBatch(
        positions=jnp.asarray(positions),
        seq_ids=jnp.asarray(seq_ids),
        query_starts=jnp.asarray(starts),
        seq_lens=jnp.asarray(lens, dtype=jnp.int32),
        num_decodes=jnp.int32(decodes),
        num_seqs=jnp.int32(len(sequences)),
        decode_only=decode_only,
    )


def check(step: Step, implementation: str, *, rtol: float = 1e-5) -> None:
    """Runs the step and compares outputs, every written state, and every word that must stay as it was.

    rtol: of the largest value, for outputs and states; bfloat16 outputs and states get half a unit in the
    last place more.
    """

    @partial(jax.jit, donate_argnums=1)
    def run(tokens, pages, batch, table):
        place = step.place | {"implementation": implementation}
        return step.operation.run(tokens, step.operation.weights, pages, batch, table, **place)

    out, pages = run(step.tokens, jnp.asarray(step.pages), step.batch, step.table)
    real = int(np.asarray(step.batch.query_starts)[-1])
    if real:
        scale = np.abs(step.out[:real]).max()
        last_place = 2.0**-8 if out.dtype == jnp.bfloat16 else 0.0
        got = np.asarray(out.astype(jnp.float32))[:real]
        np.testing.assert_allclose(got, step.out[:real], rtol=last_place, atol=rtol * scale)
    assert not np.asarray(out)[real:].any()
    pages = np.asarray(pages)
    expected = step.pages.copy()
    for blocks, states in step.states.items():
        found = parts_of(step, pages, blocks)
        for part, value, state in zip(step.parts, found, states, strict=True):
            bits = 2.0**-8 if step.layout.dtypes[part] == "bfloat16" else 0.0
            np.testing.assert_allclose(value, state, rtol=bits, atol=rtol * np.abs(state).max())
        put_parts(step, expected, blocks, found)
    np.testing.assert_array_equal(pages, expected)
