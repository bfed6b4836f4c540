"""What `check_device.py` runs: the operations at published shapes, and what each has to move or multiply.

Arguments are made with numpy, pools by a few operations on the device: to make an operation compiles nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import CASES, Case

from pallas_kernels import (
    AttentionPageLayout,
    GroupTable,
    RaggedBatch,
    paged_attention,
    write_and_attend,
    write_kv,
    write_latent,
)
from pallas_kernels.layout import KEY_SCALES
from pallas_kernels.operations import IMPLEMENTATIONS, choose_implementation
from pallas_kernels.quantised import LARGEST
from pallas_kernels.recurrent import (
    StateLayout,
    StateTable,
    causal_conv1d,
    gated_delta_rule,
    selective_scan,
    ssd,
)
from pallas_kernels.recurrent.choice import Implementation, choose
from pallas_kernels.recurrent.operations import CAUSAL_CONV1D, GATED_DELTA_RULE, SELECTIVE_SCAN, SSD
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.settings import AttentionSettings

TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-5}
RECURRENT_TOLERANCE = 1e-3  # of float32 sums in another order, over a state
NULL_WORD = 0x7FC17FC1  # a NaN as float32, and a pair of NaNs as bfloat16
NO_NAN_BYTES = 0xBFBFBFBF  # what no byte of a float8_e4m3fn is NaN under
LARGEST_KEPT = 4.0  # of K and V: scores differ enough that a few tokens have most of the weight
SMALL_CONTEXT, SMALL_NEW, SMALL_SPAN, SMALL_SEQUENCES = 300, 70, 150, 2


class Work(NamedTuple):
    """What nobody can do without: bytes moved; operations of matrix products, 0 where memory is the bound."""

    moved: int
    flops: int = 0


class Operation(NamedTuple):
    """A call to compare and to time.

    call(implementation, x, rest, pool) gives the output, of the shape of x, and the pool after it; `rest` are
    arrays of which nothing depends on the call before. x and rest are numpy's.
    chosen: the implementation that runs on this platform by default.
    """

    call: Callable[[str | None, jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array]]
    make_pool: Callable[[], jax.Array]
    x: np.ndarray
    rest: Any
    work: Work
    chosen: str
    tolerance: float


def shrunk(case: Case) -> Case:
    """The same kernel at a size whose plain reference fits anywhere: several pages, chunks and windows."""
    span = None if case.window is None and case.chunk is None else SMALL_SPAN
    return replace(
        case,
        sequences=min(case.sequences, SMALL_SEQUENCES),
        context=min(case.context, SMALL_CONTEXT),
        new=min(case.new, SMALL_NEW),
        window=None if case.window is None else span,
        chunk=None if case.chunk is None else span,
    )


def attention_operation(case: Case) -> Operation:
    """Attention, or the write, of sequences whose newest tokens are this step's."""
    rng = np.random.default_rng(0)
    width = -(-case.context // case.block_size)
    count = case.sequences * width + 1
    ids = rng.permutation(np.arange(1, count)).reshape(case.sequences, width)
    table = GroupTable(_ints(ids), _ints(np.zeros(case.sequences)))
    batch = _batch(case.sequences, case.context, case.new)
    place: dict[str, Any] = {"layout": case.layout, "layer_slot": 0, "layer_slots": 1}
    spans: dict[str, Any] = {"sliding_window": case.window, "attention_chunk_size": case.chunk}
    tokens = case.sequences * case.new
    heads = case.kv_heads if case.kernel == "write" else case.q_heads
    x = rng.standard_normal((tokens, heads, case.head_size), np.float32).astype(case.activation_dtype)
    queries = None if case.kernel == "write" else jax.ShapeDtypeStruct(x.shape, x.dtype)
    chosen = choose_implementation(AttentionSettings(**place, **spans), table, q=queries)

    def attend(
        implementation: str | None, q: jax.Array, rest: Any, pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        sinks = jnp.linspace(-1.0, 1.0, case.q_heads) if case.sinks else None
        how: dict[str, Any] = {"scale": case.head_size**-0.5, "sinks": sinks, **place, **spans}
        if case.writes:
            k = q[:, : case.kv_heads]
            v = None if case.latent else -k[..., : case.layout.value_size]
            out, pool = write_and_attend(q, k, v, pool, *rest, implementation=implementation, **how)
        else:
            out = paged_attention(q, pool, *rest, implementation=implementation, **how)
        padding = case.head_size - case.layout.value_size  # the next call's x is made of it
        if padding < 0:
            return out[..., :padding], pool
        return jnp.pad(out, ((0, 0), (0, 0), (0, padding))), pool

    def write(
        implementation: str | None, k: jax.Array, rest: Any, pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if case.latent:
            return k, write_latent(pool, k, *rest, implementation=implementation, **place)
        v = -k[..., : case.layout.value_size]
        return k, write_kv(pool, k, v, *rest, implementation=implementation, **place)

    return Operation(
        call=write if case.kernel == "write" else attend,
        make_pool=partial(_random_pool, count, case.layout),
        x=x,
        rest=(batch, table),
        work=_write_work(case) if case.kernel == "write" else _attention_work(case),
        chosen=next(name for name, known in IMPLEMENTATIONS.items() if known is chosen),
        tolerance=TOLERANCE[x.dtype.name],
    )


def _write_work(case: Case) -> Work:
    """Every token read and written once."""
    return Work(moved=2 * case.sequences * case.new * _token_bytes(case))


def _token_bytes(case: Case) -> int:
    return case.layout.used_words * 4 // case.block_size


def _attention_work(case: Case) -> Work:
    """A decode moves the K and V that it sees; a prefill multiplies every query with what it sees, twice."""
    position = np.arange(case.context - case.new, case.context)
    first = np.zeros_like(position)
    if case.window is not None:
        first = np.maximum(position - case.window + 1, 0)
    if case.chunk is not None:
        first = position // case.chunk * case.chunk
    seen = int((position - first + 1).sum()) * case.sequences
    if case.new == 1:
        return Work(moved=seen * _token_bytes(case))
    unseen = int(first[0])
    return Work(
        moved=(case.context - unseen) * case.sequences * _token_bytes(case),
        flops=2 * seen * case.q_heads * (case.head_size + case.layout.value_size),
    )


def _random_pool(count: int, layout: AttentionPageLayout) -> jax.Array:
    """Pages of numbers up to 4 in magnitude, by a hash of where they are; the null block's are NaN."""
    word = jax.lax.iota(jnp.uint32, count * layout.page_rows * 128).reshape(count, layout.page_rows, 128)
    first, second = _hash(word), _hash(word + jnp.uint32(count * layout.page_rows * 128))
    if layout.is_quantised:
        scale = (2 + jnp.abs(_spread(second)) / 2) / LARGEST[layout.dtype]  # 2 to 4 over the largest number
        of_page = word % jnp.uint32(layout.page_rows * 128)
        is_scale = of_page >= jnp.uint32(layout.first_word(0, KEY_SCALES))
        words = jnp.where(
            is_scale, jax.lax.bitcast_convert_type(scale, jnp.uint32), first & jnp.uint32(NO_NAN_BYTES)
        )
    elif layout.dtype == "float32":
        words = jax.lax.bitcast_convert_type(_spread(first), jnp.uint32)
    else:
        low, high = (
            jax.lax.bitcast_convert_type(_spread(x).astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
            for x in (first, second)
        )
        words = low | (high << 16)
    return words.at[0].set(jnp.uint32(NULL_WORD))


def _hash(x: jax.Array) -> jax.Array:
    """Every number's bits mixed, uint32 (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _spread(bits: jax.Array) -> jax.Array:
    """Float32 from -4 to 4, evenly, from evenly spread bits."""
    between_one_and_two = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    return (between_one_and_two - 1.5) * (2 * LARGEST_KEPT)


class RecurrentCase(NamedTuple):
    """A recurrent operation on `sequences` sequences with `new` tokens each; shape of its state.

    Published shapes: Jamba 1.5 Mini's channels, Mamba 2 2.7B's heads, Qwen3-Next's channels and value heads
    on one of four tensor-parallel devices.
    """

    kernel: str
    shape: tuple[int, ...]
    sequences: int = 64
    new: int = 1

    def shrunk(self) -> "RecurrentCase":
        """The same kernel on fewer channels or heads, sequences and tokens."""
        first = min(self.shape[0], 256 if len(self.shape) == 2 else 8)
        return self._replace(
            shape=(first, *self.shape[1:]),
            sequences=min(self.sequences, SMALL_SEQUENCES),
            new=min(self.new, SMALL_NEW),
        )


RECURRENT_CASES = {
    (kernel, f"{name} {kind}"): RecurrentCase(kernel, shape, sequences, new)
    for name, kernel, shape in (
        ("qwen3-next/4", "conv", (2048, 3)),
        ("jamba-1.5-mini", "selective scan", (8192, 16)),
        ("mamba2-2.7b", "ssd", (80, 64, 128)),
        ("qwen3-next/4", "delta rule", (8, 128, 128)),
    )
    for kind, sequences, new in (("decode", 64, 1), ("prefill", 1, 2048))
}


def recurrent_operation(case: RecurrentCase) -> Operation:
    """A recurrent operation that reads and writes its states in place."""
    layout = StateLayout(
        shapes=(case.shape,), dtypes=("float32",), page_rows=-(-int(np.prod(case.shape)) // 1024) * 8
    )
    blocks = _ints(np.arange(1, case.sequences + 1))[:, None]
    none = _ints(np.zeros((case.sequences, 0)))
    table = StateTable(blocks, blocks, none, none[..., None])
    batch = _batch(case.sequences, max(case.new, 2), case.new)
    place: dict[str, Any] = {"layout": layout, "part": 0, "layer_slot": 0, "layer_slots": 1}
    tokens = case.sequences * case.new
    kind = _KINDS[case.kernel]
    inputs = kind.inputs(case.shape, tokens)
    key_heads = inputs.shared[0].shape[1] if case.kernel == "delta rule" else 0
    chosen = choose(kind.known, StatePlace(**place), None, key_heads)

    def call(
        implementation: str | None, x: jax.Array, rest: Any, pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        shared, batch, table = rest
        result = kind.run(x, shared, pool, batch, table, implementation=implementation, **place)
        return result.out, result.pages

    state = 4 * int(np.prod(case.shape))
    return Operation(
        call=call,
        make_pool=lambda: jnp.zeros((case.sequences + 1, layout.page_rows, 128), jnp.uint32),
        x=inputs.x,
        rest=(inputs.shared, batch, table),
        work=Work(moved=2 * case.sequences * state + 2 * inputs.x.nbytes),
        chosen=next(name for name, way in kind.known.items() if way.run is chosen),
        tolerance=RECURRENT_TOLERANCE,
    )


class Inputs(NamedTuple):
    """The activations that the output has the shape of, and the other arguments."""

    x: np.ndarray
    shared: tuple[np.ndarray, ...]


class Kind(NamedTuple):
    """An operation's implementations, its inputs for a state's shape and some tokens, and how to run it."""

    known: dict[str, Implementation]
    inputs: Callable[[tuple[int, ...], int], Inputs]
    run: Callable[..., StepResult]


def _conv_inputs(shape: tuple[int, ...], tokens: int) -> Inputs:
    channels, kept = shape
    return Inputs(_normal(0, tokens, channels), (_normal(1, channels, kept + 1), _normal(2, channels)))


def _selective_inputs(shape: tuple[int, ...], tokens: int) -> Inputs:
    channels, states = shape
    dt, b, c = (_normal(i, tokens, n) for i, n in enumerate((channels, states, states)))
    a, d = -np.exp(_normal(3, channels, states)), _normal(4, channels)
    return Inputs(_normal(5, tokens, channels), (_softplus(dt), a, b, c, d))


def _ssd_inputs(shape: tuple[int, ...], tokens: int) -> Inputs:
    heads, size, states = shape
    dt = _softplus(_normal(0, tokens, heads))
    b, c = (_normal(i, tokens, 1, states) / np.float32(states**0.5) for i in (1, 2))
    return Inputs(_normal(5, tokens, heads, size), (dt, -np.exp(_normal(3, heads)), b, c, _normal(4, heads)))


def _delta_inputs(shape: tuple[int, ...], tokens: int) -> Inputs:
    heads, values, keys = shape
    q, k = (_normal(i, tokens, max(heads // 2, 1), keys) for i in (0, 1))
    g, beta = -_softplus(_normal(2, tokens, heads)), np.exp(-_softplus(_normal(3, tokens, heads)))
    return Inputs(_normal(5, tokens, heads, values), (q, k, g, beta))


def _run_conv(x: jax.Array, shared: Any, *rest: Any, **place: Any) -> StepResult:
    return causal_conv1d(x, *shared, *rest, activation="silu", **place)


def _run_selective(x: jax.Array, shared: Any, *rest: Any, **place: Any) -> StepResult:
    return selective_scan(x, *shared, *rest, **place)


def _run_ssd(x: jax.Array, shared: Any, *rest: Any, **place: Any) -> StepResult:
    return ssd(x, *shared, *rest, **place)


def _run_delta(x: jax.Array, shared: Any, *rest: Any, **place: Any) -> StepResult:
    q, k, g, beta = shared
    return gated_delta_rule(q, k, x, g, beta, *rest, scale=q.shape[-1] ** -0.5, l2norm_eps=1e-6, **place)


_KINDS = {
    "conv": Kind(CAUSAL_CONV1D, _conv_inputs, _run_conv),
    "selective scan": Kind(SELECTIVE_SCAN, _selective_inputs, _run_selective),
    "ssd": Kind(SSD, _ssd_inputs, _run_ssd),
    "delta rule": Kind(GATED_DELTA_RULE, _delta_inputs, _run_delta),
}


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, np.float32(0))


def _ints(values: Any) -> Any:
    return np.asarray(values, np.int32)


def _batch(sequences: int, context: int, new: int) -> RaggedBatch:
    """Sequences of `context` tokens, the last `new` of each in this step."""
    return RaggedBatch(
        positions=_ints(np.tile(np.arange(context - new, context), sequences)),
        seq_ids=_ints(np.repeat(np.arange(sequences), new)),
        query_starts=_ints(np.arange(sequences + 1) * new),
        seq_lens=_ints(np.full(sequences, context)),
        num_decodes=_ints(sequences if new == 1 else 0),
        num_seqs=_ints(sequences),
        decode_only=new == 1,
    )


def operations(*, small: bool) -> dict[tuple[str, str], Callable[[], Operation]]:
    """By kernel and shape: makes each operation, at its own size or at one that a reference can follow.

    One shape of each kernel comes first.
    """
    made: dict[tuple[str, str], Callable[[], Operation]] = {}
    first = {(case.kernel, name): case for name, case in CASES.items() if case.quick}
    decodes = {name: case for name, case in RECURRENT_CASES.items() if case.new == 1}
    others = {(case.kernel, name): case for name, case in CASES.items()}
    for name, case in (first | decodes | others | RECURRENT_CASES).items():
        if isinstance(case, Case):
            made[name] = partial(attention_operation, shrunk(case) if small else case)
        else:
            made[name] = partial(recurrent_operation, case.shrunk() if small else case)
    return made
