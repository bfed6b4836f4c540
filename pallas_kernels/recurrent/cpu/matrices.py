"""Mamba 2 and the gated delta rule: chunks of a few tokens, 16 channels of a head's state at a time.

Within a chunk of tokens i, with S the state before it, `decay(i, j)` what is left at token i of what token j
added and `decay(i)` of S, all sums over the state's rows are taken from S, and S changes once:

    value_j = dt_j x_j                                                  Mamba 2
    value_i = beta_i (v_i - decay(i) S k_i
                      - sum over j < i of decay(i, j) (k_i . k_j) value_j)   delta rule
    out_i   = decay(i) S q_i + sum over j <= i of decay(i, j) (q_i . k_j) value_j
    S      := decay(last) S + sum over j of decay(last, j) k_j value_j

That is little more than two multiply-adds a token for a number of the state, three with the delta rule.
Chunks begin at multiples of CHUNK of the sequence, so cutting a prompt there changes no bit. Logarithms of
decays between tokens are sums of their own, not differences of running sums, which a strong one would spoil.
"""

from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.cpu import registers as r
from pallas_kernels.cpu.instruction import compiled
from pallas_kernels.cpu.memory import load_float32, store_float32
from pallas_kernels.recurrent.cpu import tiles
from pallas_kernels.recurrent.cpu.exponentials import exp2_of_negative
from pallas_kernels.recurrent.cpu.states import ADDRESS, WORD
from pallas_kernels.recurrent.cpu.units import LANES, Units

CHUNK = 8
"""Tokens of a chunk: more would save little (a state is decayed once a chunk) and cost sums within it."""


class Rule(NamedTuple):
    """What differs between the operations: functions compiled by numba.

    load_keys(call, token, head, key, query): a token's key and query, as many floats as the state has rows.
    log_of_decay(call, token, head): of the token, to base 2.
    load_value(call, token, head, column): 16 channels, times their share if not `solves`.
    share(call, token, head): beta. store_out(call, token, head, column, total).
    solves: whether values are what is not yet in the state, as in the delta rule.
    """

    load_keys: Any
    log_of_decay: Any
    load_value: Any
    share: Any
    store_out: Any
    solves: bool


class ChunkSizes(NamedTuple):
    """head_size: channels of a head. size: rows of its state, floats of a key. heads_of_key: sharing it."""

    head_size: int
    size: int
    heads_of_key: int


class _Room(NamedTuple):
    """Bytes from the start of a chunk's room."""

    keys: int
    queries: int
    seen: int
    asked: int
    values: int
    decays: int
    alike: int
    end: int


def _room(sizes: ChunkSizes) -> _Room:
    key_rows, value_rows = CHUNK * sizes.size * WORD, CHUNK * sizes.head_size * WORD
    places = [0]
    for count in (key_rows, key_rows, value_rows, value_rows, value_rows, *[CHUNK * r.BYTES] * 2):
        places.append(places[-1] + -(-count // r.BYTES) * r.BYTES)
    return _Room(*places)


def span_bytes(sizes: ChunkSizes) -> int:
    """Bytes of room that a span of chunks needs."""
    return _room(sizes).end


def make_span(units: Units, sizes: ChunkSizes, rule: Rule) -> Any:
    """The `span` of `walk.make_kernel`."""
    room_of = _room(sizes)
    keys_at, queries_at, seen_at, asked_at, values_at, decays_at, alike_at, _ = room_of
    head_size, size, heads_of_key = sizes
    heads_of_block = units.width // head_size
    heads = units.blocks * heads_of_block
    key_row, value_row = size * WORD, head_size * WORD
    register, chunk_tokens, solves = r.BYTES, CHUNK, rule.solves
    load_keys, log_of_decay, load_value, share, store_out, _ = rule
    sums, grow = tiles.sums(CHUNK, 1), tiles.grow(CHUNK, 1)
    across = next(count for count in (8, 4, 2, 1) if head_size % (count * LANES) == 0)
    both_sums, grow_of_one = tiles.sums(2, across, ahead=True), tiles.grow(1, across)
    wide = across * LANES
    together = heads_of_block if heads_of_key % heads_of_block == 0 else 1
    advance_across = next(count for count in (8, 4, 2, 1) if together * head_size % (count * LANES) == 0)
    advance = tiles.advance(advance_across, max(1, advance_across * LANES // head_size))
    advance_wide = advance_across * LANES

    @compiled
    def dot(a, b):
        total = r.splat(np.float32(0))
        for at in range(0, key_row, register):
            total = r.multiply_add(r.load(a + at), r.load(b + at), total)
        return r.sum_of_lanes(total)

    @compiled
    def prepare_keys(call, room, head, first, count):
        for token in range(chunk_tokens):
            key, query = room + keys_at + token * key_row, room + queries_at + token * key_row
            if token < count:
                load_keys(call, first + token, head, key, query)
            else:
                for at in range(0, key_row, register):
                    r.store(key + at, r.splat(np.float32(0)))
                    r.store(query + at, r.splat(np.float32(0)))

    @compiled
    def prepare_decays(call, room, head, first, count):
        """A row for each token: what is left of S, then of what each token up to it added."""
        logs = r.splat(np.float32(0))
        for token in range(count):
            logs = r.add(logs, r.splat(log_of_decay(call, first + token, head)))
            logs = r.first_lanes(logs, token + 1)
            r.store(room + decays_at + token * register, exp2_of_negative(logs))

    @compiled
    def prepare_pairs(call, room, head, first, count):
        """Row i of `alike`: what j's value adds to i's output; from CHUNK on, what i's to j's value."""
        for i in range(count):
            for j in range(i + 1):
                decay = load_float32(room + decays_at + i * register + (j + 1) * WORD)
                key = room + keys_at + j * key_row
                asked = decay * dot(room + queries_at + i * key_row, key)
                store_float32(room + alike_at + i * register + j * WORD, asked)
                if solves and j < i:
                    own = share(call, first + i, head) * decay * dot(room + keys_at + i * key_row, key)
                    at = room + alike_at + j * register + (chunk_tokens + i) * WORD
                    store_float32(at, -own)

    @compiled
    def column_values(call, room, head, first, count, column):
        values = room + values_at + column * WORD
        for i in range(count):
            value = load_value(call, first + i, head, column)
            if solves:
                beta = r.splat(share(call, first + i, head))
                seen = r.load(room + seen_at + i * value_row + column * WORD)
                left = r.load_splat(room + decays_at + i * register)
                value = r.multiply(beta, r.subtract(value, r.multiply(left, seen)))
                for j in range(i):
                    factor = r.load_splat(room + alike_at + j * register + (chunk_tokens + i) * WORD)
                    value = r.multiply_add(factor, r.load(values + j * value_row), value)
            r.store(values + i * value_row, value)

    @compiled
    def column_out(call, room, head, first, count, column):
        values = room + values_at + column * WORD
        for i in range(count):
            asked = r.load(room + asked_at + i * value_row + column * WORD)
            total = r.multiply(r.load_splat(room + decays_at + i * register), asked)
            for j in range(i + 1):
                factor = r.load_splat(room + alike_at + i * register + j * WORD)
                total = r.multiply_add(factor, r.load(values + j * value_row), total)
            store_out(call, first + i, head, column, total)
        for j in range(count):
            left = r.load_splat(room + decays_at + (count - 1) * register + (j + 1) * WORD)
            r.store(values + j * value_row, r.multiply(left, r.load(values + j * value_row)))

    @compiled
    def chunk(call, room, head, first, count, rows, offset):
        left = load_float32(room + decays_at + (count - 1) * register)
        for column in range(0, head_size, LANES):
            here, at = column * WORD, offset + column * WORD
            if solves:
                sums(room + keys_at, key_row, rows, at, size, room + seen_at + here, value_row)
            sums(room + queries_at, key_row, rows, at, size, room + asked_at + here, value_row)
            column_values(call, room, head, first, count, column)
            column_out(call, room, head, first, count, column)
            for token in range(count, chunk_tokens):
                r.store(room + values_at + token * value_row + here, r.splat(np.float32(0)))
            values = room + values_at + here
            grow(left, room + keys_at, key_row, rows, at, size, values, value_row)

    @compiled
    def one_token(call, room, head, first, rows, offset):
        """A chunk of one token: no sums for others, more channels at a time."""
        for column in range(0, head_size, wide):
            here, at = column * WORD, offset + column * WORD
            both, keys = room + seen_at + here, room + keys_at
            both_sums(keys, queries_at - keys_at, rows, at, size, both, asked_at - seen_at)
            for one in range(column, column + wide, LANES):
                column_values(call, room, head, first, 1, one)
                column_out(call, room, head, first, 1, one)
            left = load_float32(room + decays_at)
            grow_of_one(left, keys, key_row, rows, at, size, room + values_at + here, value_row)

    @compiled
    def one_token_of_heads(call, room, head, first, rows, offset):
        """A chunk of one token that needs no sums of the state before it, of heads next to each other."""
        values, asked = room + values_at, room + asked_at
        for index in range(together):
            decay = exp2_of_negative(r.splat(log_of_decay(call, first, head + index)))
            r.store(room + decays_at + index * register, decay)
            for column in range(0, head_size, LANES):
                value = load_value(call, first, head + index, column)
                r.store(values + index * value_row + column * WORD, value)
        for column in range(0, together * head_size, advance_wide):
            here, at = column * WORD, offset + column * WORD
            lefts = room + decays_at + column // head_size * register
            advance(lefts, room + keys_at, room + queries_at, rows, at, size, values + here, asked + here)
        for index in range(together):
            for column in range(0, head_size, LANES):
                total = r.load(asked + index * value_row + column * WORD)
                store_out(call, first, head + index, column, total)

    @compiled
    def span(call, unit, table, room, first, stop, position):
        while first < stop:
            count = min(stop - first, chunk_tokens - position % chunk_tokens)
            in_one_pass = count == 1 and not solves
            for index in range(0, heads, together if in_one_pass else 1):
                head = unit * heads + index
                if index == 0 or head % heads_of_key == 0:
                    prepare_keys(call, room, head, first, count)
                rows = table + index // heads_of_block * size * ADDRESS
                offset = index % heads_of_block * head_size * WORD
                if in_one_pass:
                    one_token_of_heads(call, room, head, first, rows, offset)
                else:
                    prepare_decays(call, room, head, first, count)
                    prepare_pairs(call, room, head, first, count)
                    if count == 1:
                        one_token(call, room, head, first, rows, offset)
                    else:
                        chunk(call, room, head, first, count, rows, offset)
            first += count
            position += count

    return span
