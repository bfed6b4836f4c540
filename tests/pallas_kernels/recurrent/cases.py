"""Random recurrent steps over a poisoned pool, and the recurrences written again in numpy, token by token.

The recurrences are in float64 and follow the papers: Mamba (Gu and Dao 2023, equation 2), Mamba 2 (Dao and Gu
2024, the scalar times identity case), Gated Delta Networks (Yang and others 2024, equation 10).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import RaggedBatch
from pallas_kernels.recurrent import (
    StateLayout,
    StateTable,
    causal_conv1d,
    gated_delta_rule,
    selective_scan,
    ssd,
)

GUARD = 0x7FC17FC1  # a NaN as float32, and a pair of NaNs as bfloat16
Tokens = dict[str, np.ndarray]
"""By name: arrays `[T, ...]`."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation at one size.

    shape: of the state's part. tokens(rng, n): n tokens' inputs. weights: what all tokens share.
    token(state, inputs): one token by the book; changes nothing, returns the new state and the output.
    run(tokens, weights, pages, batch, table, **place): the function under test.
    """

    name: str
    shape: tuple[int, ...]
    tokens: Callable[[np.random.Generator, int], Tokens]
    weights: dict[str, Any]
    token: Callable[[np.ndarray, Tokens], tuple[np.ndarray, np.ndarray]]
    run: Callable[..., Any]


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def convolution(channels: int, kernel: int = 4, *, bias: bool = True, silu: bool = True) -> Operation:
    """Causal convolution of `[T, channels]`."""
    rng = np.random.default_rng(1)
    weight, offset = _normal(rng, channels, kernel), _normal(rng, channels) if bias else None

    def token(state: np.ndarray, inputs: Tokens) -> tuple[np.ndarray, np.ndarray]:
        window = np.concatenate([state, inputs["x"][:, None]], axis=1)
        out = (window * weight).sum(axis=1) + (0 if offset is None else offset)
        return window[:, 1:], _silu(out) if silu else out

    def run(tokens, weights, pages, batch, table, **place):
        activation = "silu" if silu else None
        return causal_conv1d(
            tokens["x"],
            weights["weight"],
            weights["bias"],
            pages,
            batch,
            table,
            activation=activation,
            **place,
        )

    return Operation(
        name="conv",
        shape=(channels, kernel - 1),
        tokens=lambda rng, n: {"x": _normal(rng, n, channels)},
        weights={"weight": weight, "bias": offset},
        token=token,
        run=run,
    )


def mamba1(channels: int, size: int) -> Operation:
    """Selective scan; one channel's decays span slow and fast ones."""
    rng = np.random.default_rng(2)
    a = -np.exp(rng.uniform(-1, 2, size=(channels, size))).astype(np.float32)
    d = _normal(rng, channels)

    def token(state: np.ndarray, inputs: Tokens) -> tuple[np.ndarray, np.ndarray]:
        x, dt, b, c = (inputs[name] for name in ("x", "dt", "b", "c"))
        state = np.exp(dt[:, None] * a) * state + dt[:, None] * x[:, None] * b[None]
        return state, state @ c + d * x

    def tokens(rng: np.random.Generator, n: int) -> Tokens:
        return {
            "x": _normal(rng, n, channels),
            "dt": np.log1p(np.exp(_normal(rng, n, channels) - 2)),
            "b": _normal(rng, n, size),
            "c": _normal(rng, n, size),
        }

    def run(tokens, weights, pages, batch, table, **place):
        x, dt, b, c = (tokens[name] for name in ("x", "dt", "b", "c"))
        return selective_scan(x, dt, weights["a"], b, c, weights["d"], pages, batch, table, **place)

    return Operation(
        name="mamba1",
        shape=(channels, size),
        tokens=tokens,
        weights={"a": a, "d": d},
        token=token,
        run=run,
    )


def mamba2(heads: int, head_size: int, size: int, groups: int = 1, *, skip: bool = True) -> Operation:
    """SSD; `skip`: with d."""
    rng = np.random.default_rng(3)
    a = -np.exp(rng.uniform(-1, 2, size=heads)).astype(np.float32)
    d = _normal(rng, heads) if skip else None
    group = np.arange(heads) // (heads // groups)

    def token(state: np.ndarray, inputs: Tokens) -> tuple[np.ndarray, np.ndarray]:
        x, dt, b, c = inputs["x"], inputs["dt"], inputs["b"][group], inputs["c"][group]
        decay = np.exp(dt * a)[:, None, None]
        state = decay * state + (dt[:, None] * x)[:, :, None] * b[:, None, :]
        out = (state * c[:, None, :]).sum(axis=2)
        return state, out if d is None else out + d[:, None] * x

    def tokens(rng: np.random.Generator, n: int) -> Tokens:
        return {
            "x": _normal(rng, n, heads, head_size),
            "dt": np.log1p(np.exp(_normal(rng, n, heads) - 2)),
            "b": _normal(rng, n, groups, size),
            "c": _normal(rng, n, groups, size),
        }

    def run(tokens, weights, pages, batch, table, **place):
        x, dt, b, c = (tokens[name] for name in ("x", "dt", "b", "c"))
        return ssd(x, dt, weights["a"], b, c, weights["d"], pages, batch, table, **place)

    return Operation(
        name="mamba2",
        shape=(heads, head_size, size),
        tokens=tokens,
        weights={"a": a, "d": d},
        token=token,
        run=run,
    )


def delta(
    key_heads: int, value_heads: int, key_size: int, value_size: int, *, alike: bool = False
) -> Operation:
    """Gated delta rule; `alike`: keys that hardly differ, the hardest case of a chunked form."""
    scale, eps = key_size**-0.5, 1e-6
    key_head = np.arange(value_heads) // (value_heads // key_heads)

    def token(state: np.ndarray, inputs: Tokens) -> tuple[np.ndarray, np.ndarray]:
        q, k = (x / np.sqrt((x * x).sum(axis=1, keepdims=True) + eps) for x in (inputs["q"], inputs["k"]))
        q, k = q[key_head], k[key_head]
        state = np.exp(inputs["g"])[:, None, None] * state
        seen = (state * k[:, None, :]).sum(axis=2)
        new = inputs["beta"][:, None] * (inputs["v"] - seen)
        state = state + new[:, :, None] * k[:, None, :]
        return state, scale * (state * q[:, None, :]).sum(axis=2)

    def tokens(rng: np.random.Generator, n: int) -> Tokens:
        k = _normal(rng, n, key_heads, key_size)
        return {
            "q": _normal(rng, n, key_heads, key_size),
            "k": 0.05 * k + 1 if alike else k,
            "v": _normal(rng, n, value_heads, value_size),
            "g": -np.exp(_normal(rng, n, value_heads) - 3),
            "beta": 1 / (1 + np.exp(-_normal(rng, n, value_heads))),
        }

    def run(tokens, weights, pages, batch, table, **place):
        del weights
        q, k, v, g, beta = (tokens[name] for name in ("q", "k", "v", "g", "beta"))
        return gated_delta_rule(q, k, v, g, beta, pages, batch, table, scale=scale, l2norm_eps=eps, **place)

    return Operation(
        name="delta",
        shape=(value_heads, value_size, key_size),
        tokens=tokens,
        weights={},
        token=token,
        run=run,
    )


def with_strong_decays(operation: Operation) -> Operation:
    """Decays of exp(-200), three in a row, before five of exp(-0.0001), and so on."""

    def tokens(rng: np.random.Generator, n: int) -> Tokens:
        logs = np.where(np.arange(n) % 8 < 3, -200, -1e-4)[:, None]
        if operation.name == "delta":
            changed = {"g": np.repeat(logs, operation.shape[0], axis=1).astype(np.float32)}
        else:
            changed = {"dt": (logs / operation.weights["a"]).astype(np.float32)}
        return operation.tokens(rng, n) | changed

    return replace(operation, tokens=tokens)


def in_bfloat16(operation: Operation) -> Operation:
    """With inputs in bfloat16 but for steps, decays and shares."""

    def tokens(rng: np.random.Generator, n: int) -> Tokens:
        return {
            name: value if name in ("dt", "g", "beta") else value.astype(jnp.bfloat16)
            for name, value in operation.tokens(rng, n).items()
        }

    return replace(operation, tokens=tokens)


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

    pages: the pool before; every word but the initial states' is NaN. out: `[T, ...]` float64. states: by
    block ids `[P]`, the part's value that must be there afterwards.
    """

    operation: Operation
    layout: StateLayout
    part: int
    layer_slot: int
    layer_slots: int
    tokens: Tokens
    pages: np.ndarray
    batch: RaggedBatch
    table: StateTable
    out: np.ndarray
    states: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    @property
    def place(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "part": self.part,
            "layer_slot": self.layer_slot,
            "layer_slots": self.layer_slots,
        }


def page_of(blocks: tuple[int, ...], page: int, layer_slot: int, layer_slots: int) -> int:
    """Where page number `page` of a layer's state is in the pool."""
    slot = layer_slot + page
    return blocks[slot // layer_slots] * layer_slots + slot % layer_slots


def part_of(step: Step, pages: np.ndarray, blocks: tuple[int, ...]) -> np.ndarray:
    """The part's value in `blocks` of a pool."""
    words = np.concatenate(
        [
            pages[page_of(blocks, k, step.layer_slot, step.layer_slots)].reshape(-1)
            for k in range(step.layout.num_pages)
        ]
    )
    return np.asarray(step.layout.unpack(jnp.asarray(words))[step.part].astype(jnp.float32))


def put_part(step: Step, pages: np.ndarray, blocks: tuple[int, ...], value: np.ndarray) -> None:
    """Writes the part's words, and no other, into `blocks` of a pool."""
    values = [jnp.zeros(shape) for shape in step.layout.shapes]
    values[step.part] = jnp.asarray(value)
    words = np.asarray(step.layout.pack(tuple(values)))
    start, size = step.layout.parts[step.part]
    for index in range(start, start + size):
        page = page_of(blocks, index // step.layout.page_words, step.layer_slot, step.layer_slots)
        pages[page].reshape(-1)[index % step.layout.page_words] = words[index]


def make_step(
    operation: Operation,
    sequences: list[Sequence],
    *,
    dtype: str = "float32",
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
    """A step of `sequences`, which come with one-token ones first. `beside`: a bfloat16 part next to ours."""
    rng = np.random.default_rng(seed)
    shapes = (beside, operation.shape) if part else (operation.shape, beside)
    dtypes = ("bfloat16", dtype) if part else (dtype, "bfloat16")
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
        part=part,
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
        state = np.zeros(operation.shape)
        if not sequence.starts_from_zeros:
            read[row] = blocks.pop()
            value = np.asarray(jnp.asarray(_normal(rng, *operation.shape), dtype).astype(jnp.float32))
            put_part(step, step.pages, tuple(read[row]), value)
            state = value.astype(np.float64)
        write[row] = read[row] if sequence.in_place and read[row, 0] else blocks.pop()
        for index, position in enumerate(sequence.checkpoints):
            lens[row, index] = position
            kept[row, index] = blocks.pop()
        for position in range(sequence.before, sequence.before + sequence.new):
            state, y = operation.token(
                state, {name: value[token].astype(np.float64) for name, value in tokens.items()}
            )
            out = np.zeros((total + spare_tokens, *y.shape)) if out is None else out
            out[token] = y
            token += 1
            if position + 1 in sequence.checkpoints:
                step.states[tuple(kept[row, sequence.checkpoints.index(position + 1)])] = state
        step.states[tuple(write[row])] = state
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
    bits = 2.0**-8 if step.layout.dtypes[step.part] == "bfloat16" else 0.0
    expected = step.pages.copy()
    for blocks, state in step.states.items():
        found = part_of(step, pages, blocks)
        np.testing.assert_allclose(found, state, rtol=bits, atol=rtol * np.abs(state).max())
        put_part(step, expected, blocks, found)
    np.testing.assert_array_equal(pages, expected)
