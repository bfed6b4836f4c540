"""The recurrences written again in numpy, token by token, with random tokens for each.

They are in float64 and follow the papers: Mamba (Gu and Dao 2023, equation 2), Mamba 2 (Dao and Gu
2024, the scalar times identity case), Gated Delta Networks (Yang and others 2024, equation 10).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent import (
    causal_conv1d,
    conv_delta_rule,
    gated_delta_rule,
    selective_scan,
    ssd,
)

Tokens = dict[str, np.ndarray]
"""By name: arrays `[T, ...]`."""
States = tuple[np.ndarray, ...]
OnePart = Callable[[np.ndarray, Tokens], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation at one size.

    shapes: of the state's parts. tokens(rng, n): n tokens' inputs. weights: what all tokens share.
    token(states, inputs): one token by the book; changes nothing, returns the parts' new states and the
    output. run(tokens, weights, pages, batch, table, **place): the function under test.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    tokens: Callable[[np.random.Generator, int], Tokens]
    weights: dict[str, Any]
    token: Callable[[States, Tokens], tuple[States, np.ndarray]]
    run: Callable[..., Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the last part."""
        return self.shapes[-1]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def of_one_part(token: OnePart) -> Callable[[States, Tokens], tuple[States, np.ndarray]]:
    """`token` for a state that has one part."""

    def of_parts(states: States, inputs: Tokens) -> tuple[States, np.ndarray]:
        state, out = token(states[0], inputs)
        return (state,), out

    return of_parts


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def convolution(channels: int, kernel: int = 4, *, bias: bool = True, silu: bool = True) -> Operation:
    """Causal convolution of `[T, channels]`."""
    rng = np.random.default_rng(1)
    weight, offset = normal(rng, channels, kernel), normal(rng, channels) if bias else None

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
        shapes=((channels, kernel - 1),),
        tokens=lambda rng, n: {"x": normal(rng, n, channels)},
        weights={"weight": weight, "bias": offset},
        token=of_one_part(token),
        run=run,
    )


def mamba1(channels: int, size: int) -> Operation:
    """Selective scan; one channel's decays span slow and fast ones."""
    rng = np.random.default_rng(2)
    a = -np.exp(rng.uniform(-1, 2, size=(channels, size))).astype(np.float32)
    d = normal(rng, channels)

    def token(state: np.ndarray, inputs: Tokens) -> tuple[np.ndarray, np.ndarray]:
        x, dt, b, c = (inputs[name] for name in ("x", "dt", "b", "c"))
        state = np.exp(dt[:, None] * a) * state + dt[:, None] * x[:, None] * b[None]
        return state, state @ c + d * x

    def tokens(rng: np.random.Generator, n: int) -> Tokens:
        return {
            "x": normal(rng, n, channels),
            "dt": np.log1p(np.exp(normal(rng, n, channels) - 2)),
            "b": normal(rng, n, size),
            "c": normal(rng, n, size),
        }

    def run(tokens, weights, pages, batch, table, **place):
        x, dt, b, c = (tokens[name] for name in ("x", "dt", "b", "c"))
        return selective_scan(x, dt, weights["a"], b, c, weights["d"], pages, batch, table, **place)

    return Operation(
        name="mamba1",
        shapes=((channels, size),),
        tokens=tokens,
        weights={"a": a, "d": d},
        token=of_one_part(token),
        run=run,
    )


def mamba2(heads: int, head_size: int, size: int, groups: int = 1, *, skip: bool = True) -> Operation:
    """SSD; `skip`: with d."""
    rng = np.random.default_rng(3)
    a = -np.exp(rng.uniform(-1, 2, size=heads)).astype(np.float32)
    d = normal(rng, heads) if skip else None
    group = np.arange(heads) // (heads // groups)

    def token(state: np.ndarray, inputs: Tokens) -> tuple[np.ndarray, np.ndarray]:
        x, dt, b, c = inputs["x"], inputs["dt"], inputs["b"][group], inputs["c"][group]
        decay = np.exp(dt * a)[:, None, None]
        state = decay * state + (dt[:, None] * x)[:, :, None] * b[:, None, :]
        out = (state * c[:, None, :]).sum(axis=2)
        return state, out if d is None else out + d[:, None] * x

    def tokens(rng: np.random.Generator, n: int) -> Tokens:
        return {
            "x": normal(rng, n, heads, head_size),
            "dt": np.log1p(np.exp(normal(rng, n, heads) - 2)),
            "b": normal(rng, n, groups, size),
            "c": normal(rng, n, groups, size),
        }

    def run(tokens, weights, pages, batch, table, **place):
        x, dt, b, c = (tokens[name] for name in ("x", "dt", "b", "c"))
        return ssd(x, dt, weights["a"], b, c, weights["d"], pages, batch, table, **place)

    return Operation(
        name="mamba2",
        shapes=((heads, head_size, size),),
        tokens=tokens,
        weights={"a": a, "d": d},
        token=of_one_part(token),
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
        k = normal(rng, n, key_heads, key_size)
        return {
            "q": normal(rng, n, key_heads, key_size),
            "k": 0.05 * k + 1 if alike else k,
            "v": normal(rng, n, value_heads, value_size),
            "g": -np.exp(normal(rng, n, value_heads) - 3),
            "beta": 1 / (1 + np.exp(-normal(rng, n, value_heads))),
        }

    def run(tokens, weights, pages, batch, table, **place):
        del weights
        q, k, v, g, beta = (tokens[name] for name in ("q", "k", "v", "g", "beta"))
        return gated_delta_rule(q, k, v, g, beta, pages, batch, table, scale=scale, l2norm_eps=eps, **place)

    return Operation(
        name="delta",
        shapes=((value_heads, value_size, key_size),),
        tokens=tokens,
        weights={},
        token=of_one_part(token),
        run=run,
    )


def convolved_delta(
    key_heads: int, value_heads: int, size: int, kernel: int = 4, *, bias: bool = True
) -> Operation:
    """A convolution with silu, then the gated delta rule of its channels, which have a first part."""
    conv = convolution((2 * key_heads + value_heads) * size, kernel, bias=bias)
    rule = delta(key_heads, value_heads, size, size)

    def heads(channels: np.ndarray) -> Tokens:
        by_head = channels.reshape(-1, size)
        q, k, v = np.split(by_head, [key_heads, 2 * key_heads])
        return {"q": q, "k": k, "v": v}

    def token(states: States, inputs: Tokens) -> tuple[States, np.ndarray]:
        last, out = conv.token(states[:1], inputs)
        matrix, out = rule.token(states[1:], inputs | heads(out))
        return (*last, *matrix), out

    def tokens(rng: np.random.Generator, n: int) -> Tokens:
        of_rule = rule.tokens(rng, n)
        return conv.tokens(rng, n) | {name: of_rule[name] for name in ("g", "beta")}

    def run(tokens, weights, pages, batch, table, **place):
        x, g, beta = (tokens[name] for name in ("x", "g", "beta"))
        weight, offset = weights["weight"], weights["bias"]
        sizes = {"scale": size**-0.5, "l2norm_eps": 1e-6, "activation": "silu"}
        return conv_delta_rule(x, weight, offset, g, beta, pages, batch, table, **sizes, **place)

    return Operation(
        name="conv and delta",
        shapes=(*conv.shapes, *rule.shapes),
        tokens=tokens,
        weights=conv.weights,
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
