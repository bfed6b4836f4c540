"""Random steps over a poisoned pool, and attention written again in numpy, one query at a time."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionPageLayout, GroupTable, RaggedBatch

GUARD = 0x7FC17FC1  # a NaN as float32, and a pair of NaNs as bfloat16


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. `history[s]` is K `[seq_len, Hkv, D]` and V `[seq_len, Hkv, Dv]` of sequence s, rounded to
    the layout's dtype; V of latents is the front of K.

    `pages` holds all but this step's tokens; every other word of the pool is NaN.
    """

    layout: AttentionPageLayout
    layer_slot: int
    layer_slots: int
    q: jnp.ndarray
    k: jnp.ndarray
    v: jnp.ndarray
    pages: jnp.ndarray
    batch: RaggedBatch
    table: GroupTable
    history: list[tuple[np.ndarray, np.ndarray]]
    query_lens: list[int]


def round_to(dtype: str, x: np.ndarray) -> np.ndarray:
    """Float32 values of `x` after storing it as `dtype`."""
    return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))


def oldest_visible(position: int, window: int | None, chunk: int | None) -> int:
    """The first position that a token sees: of its window, of its chunk, or of all."""
    if window is not None:
        return max(position - window + 1, 0)
    return 0 if chunk is None else position - position % chunk


def words_of_token(layout: AttentionPageLayout, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Words of one head of a token in each plane, by the layout's definition; k float32 `[D]`, v `[Dv]`."""
    k_bits, v_bits = (np.ascontiguousarray(x, np.float32).view(np.uint32) for x in (k, v))
    size = len(v_bits)
    if layout.dtype == "float32":
        return [k_bits] if layout.latent else [k_bits, v_bits]
    if layout.latent:
        pairs = _halves_paired(k_bits[:size]) + _halves_paired(k_bits[size:])
    else:
        both = min(size, len(k_bits))
        pairs = [*zip(k_bits[:both], v_bits[:both], strict=True)]
        pairs += _halves_paired(k_bits[both:]) + _halves_paired(v_bits[both:])
    return [np.array([(low >> 16) | (high & 0xFFFF0000) for low, high in pairs], np.uint32)]


def _halves_paired(x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    half = len(x) // 2
    return [*zip(x[:half], x[half:], strict=True)]


def write_token(
    layout: AttentionPageLayout, page: np.ndarray, slot: int, k: np.ndarray, v: np.ndarray
) -> None:
    """Puts one token into a page `uint32[page_rows, 128]`, word by word as the layout's docstring says."""
    flat = page.reshape(-1)
    start = 0  # of the plane
    for head in range(layout.num_kv_heads):
        for words in words_of_token(layout, k[head], v[head]):
            flat[start + slot * len(words) :][: len(words)] = words
            start += layout.block_size * len(words)


def make_step(
    *,
    seq_lens: list[int],
    query_lens: list[int],
    block_size: int = 4,
    heads: int = 1,
    group: int = 4,
    head_size: int = 8,
    head_size_v: int | None = None,
    latent: bool = False,
    dtype: str = "float32",
    layer_slot: int = 1,
    layer_slots: int = 3,
    window: int | None = None,
    chunk: int | None = None,
    spare_tokens: int = 0,
    spare_rows: int = 0,
    spare_width: int = 1,
    activation_dtype: str = "float32",
    seed: int = 0,
) -> Step:
    """A step of sequences with `seq_lens` tokens, the last `query_lens` of them new.

    Tables start at the first block that some query's window or chunk touches; ids are shuffled; entries past
    the end point at the null block. `spare_*` are padding tokens, padding rows and extra table entries.
    """
    rng = np.random.default_rng(seed)
    layout = AttentionPageLayout.fitting(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=dtype,
        head_size_v=head_size_v,
        latent=latent,
    )
    rows = len(seq_lens) + spare_rows
    first = np.zeros(rows, np.int32)
    for s, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        first[s] = oldest_visible(length - new, window, chunk) // block_size
    needed = [-(-length // block_size) - int(first[s]) for s, length in enumerate(seq_lens)]
    width = max([*needed, 0]) + spare_width
    ids = np.zeros((rows, width), np.int32)
    free = rng.permutation(np.arange(1, sum(needed) + 4))
    for s, count in enumerate(needed):
        ids[s, :count], free = free[:count], free[count:]
    num_blocks = sum(needed) + 4
    pages = np.full((num_blocks * layer_slots, layout.page_rows, 128), GUARD, np.uint32)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    history = []
    for length in seq_lens:
        keys = round_to(dtype, normal(length, heads, head_size))
        values = round_to(dtype, normal(length, heads, layout.value_size))
        history.append((keys, keys[..., : layout.value_size] if latent else values))
    for s, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        oldest = oldest_visible(length - new, window, chunk)
        for position in range(oldest, length - new):
            block = ids[s, position // block_size - first[s]]
            page = pages[block * layer_slots + layer_slot]
            keys, values = history[s]
            write_token(layout, page, position % block_size, keys[position], values[position])

    tokens = sum(query_lens) + spare_tokens
    positions, seq_ids = np.zeros(tokens, np.int32), np.full(tokens, rows, np.int32)
    new_k, new_v = normal(tokens, heads, head_size), normal(tokens, heads, layout.value_size)
    starts = np.concatenate([[0], np.cumsum(query_lens), np.full(spare_rows, sum(query_lens))]).astype(
        np.int32
    )
    for s, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        here = slice(starts[s], starts[s] + new)
        positions[here], seq_ids[here] = np.arange(length - new, length), s
        new_k[here], new_v[here] = (x[length - new :] for x in history[s])
    decodes = 0
    while decodes < len(query_lens) and query_lens[decodes] == 1:
        decodes += 1
    lens = np.concatenate([seq_lens, np.zeros(spare_rows)]).astype(np.int32)
    q = normal(tokens, heads * group, head_size)
    return Step(
        layout=layout,
        layer_slot=layer_slot,
        layer_slots=layer_slots,
        q=jnp.asarray(q, activation_dtype),
        k=jnp.asarray(new_k, activation_dtype),
        v=jnp.asarray(new_v, activation_dtype),
        pages=jnp.asarray(pages),
        batch=RaggedBatch(
            positions=jnp.asarray(positions),
            seq_ids=jnp.asarray(seq_ids),
            query_starts=jnp.asarray(starts),
            seq_lens=jnp.asarray(lens),
            num_decodes=jnp.int32(decodes),
            num_seqs=jnp.int32(len(seq_lens)),
        ),
        table=GroupTable(block_ids=jnp.asarray(ids), first_block=jnp.asarray(first)),
        history=history,
        query_lens=query_lens,
    )


def written_by_hand(step: Step) -> np.ndarray:
    """The pool after the step's writes, word by word."""
    pages = np.array(step.pages)
    table = np.asarray(step.table.block_ids)
    first = np.asarray(step.table.first_block)
    for s, new in enumerate(step.query_lens):
        keys, values = step.history[s]
        for position in range(len(keys) - new, len(keys)):
            block = table[s, position // step.layout.block_size - first[s]]
            page = pages[block * step.layer_slots + step.layer_slot]
            write_token(
                step.layout, page, position % step.layout.block_size, keys[position], values[position]
            )
    return pages


def attention_by_hand(
    step: Step,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of each query over the plain history, float64, `[T, Hq, Dv]`; zeros for padding tokens."""
    q = np.asarray(step.q.astype(jnp.float32), np.float64)
    out = np.zeros((*q.shape[:2], step.layout.value_size))
    group = q.shape[1] // step.layout.num_kv_heads
    token = 0
    for s, new in enumerate(step.query_lens):
        keys, values = (x.astype(np.float64) for x in step.history[s])
        for position in range(len(keys) - new, len(keys)):
            begin = oldest_visible(position, window, chunk)
            for head in range(q.shape[1]):
                scores = keys[begin : position + 1, head // group] @ q[token, head] * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                total = np.exp(scores).sum() + (0 if sinks is None else np.exp(sinks[head]))
                out[token, head] = np.exp(scores) @ values[begin : position + 1, head // group] / total
            token += 1
    return out
