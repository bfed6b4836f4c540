"""The shapes at which `check_kernels.py` looks at the recurrent TPU kernels: published models' layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import Built

from pallas_kernels import RaggedBatch
from pallas_kernels.recurrent import (
    StateLayout,
    StateTable,
    causal_conv1d,
    conv_delta_rule,
    gated_delta_rule,
    selective_scan,
    ssd,
)

POOL_BYTES = 1 << 30
PAGE_ROWS = 128


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _ints(values: Any) -> Any:
    """Int32, in numpy: a cost tool reads real values."""
    return np.asarray(values, np.int32)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A model's recurrent layer: `kernel` is "selective_scan", "ssd" or "gated_delta_rule".

    state: shape of the state's second part, in float32; key_heads: groups of Mamba 2.
    """

    kernel: str
    state: tuple[int, ...]
    key_heads: int = 0

    @property
    def conv(self) -> tuple[int, int]:
        """Shape of the state's first part: a convolution of four tokens over all channels."""
        size = self.state[-1]
        return prod(self.state[:-1]) + 2 * self.key_heads * size, 3

    def under(self, devices: int) -> "Layer":
        """One device's share; key heads are repeated where there are fewer than devices."""
        channels, *rest = self.state
        key_heads = self.key_heads and max(self.key_heads // devices, 1)
        return replace(self, state=(channels // devices, *rest), key_heads=key_heads)

    def inputs(self, tokens: int) -> tuple[Any, ...]:
        """What the operation computes from, bfloat16 but for steps and decays."""
        if self.kernel == "selective_scan":
            channels, size = self.state
            per_token, x = _shape(tokens, size), _shape(tokens, channels)
            dt, a = _shape(tokens, channels, dtype=jnp.float32), _shape(channels, size, dtype=jnp.float32)
            # Zeros, not shapes: the kernel reads b and c as scalars, which a cost tool wants to know.
            scalars = np.zeros(per_token.shape, jnp.bfloat16)
            return x, dt, a, scalars, scalars, _shape(channels, dtype=jnp.float32)
        heads, head_size, size = self.state
        key, value = _shape(tokens, self.key_heads, size), _shape(tokens, heads, head_size)
        by_head, one = _shape(tokens, heads, dtype=jnp.float32), _shape(heads, dtype=jnp.float32)
        if self.kernel == "ssd":
            return value, by_head, one, key, key, one
        return key, key, value, by_head, by_head


_MODELS = {
    "jamba-1.5-mini": Layer(kernel="selective_scan", state=(8192, 16)),
    "nemotron-3-nano": Layer(kernel="ssd", state=(64, 64, 128), key_heads=8),
    "granite-4.0-h-small": Layer(kernel="ssd", state=(128, 64, 128), key_heads=1),
    "falcon-h1-34b": Layer(kernel="ssd", state=(32, 128, 256), key_heads=2),
    "qwen3-next-80b": Layer(kernel="gated_delta_rule", state=(32, 128, 128), key_heads=16),
}
LAYERS = {
    model if devices == 1 else f"{model}/{devices}": layer.under(devices)
    for model, layer in _MODELS.items()
    for devices in (1, 4, 8)
}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d": causal_conv1d,
    "selective_scan": selective_scan,
    "ssd": ssd,
    "gated_delta_rule": gated_delta_rule,
    "conv_delta_rule": conv_delta_rule,
}


@dataclass(frozen=True, kw_only=True)
class RecurrentCase:
    """`sequences` with `new` tokens each, of which `kept` states inside are kept."""

    kernel: str
    layer: Layer
    sequences: int = 64
    new: int = 1
    kept: int = 0
    quick: bool = False

    def build(self) -> Built:
        """The whole operation, its tables full and shuffled."""
        rows, new, kept, layer = self.sequences, self.new, self.kept, self.layer
        tokens = rows * new
        layout = StateLayout(
            shapes=(layer.conv, layer.state), dtypes=("bfloat16", "float32"), page_rows=PAGE_ROWS
        )
        before = np.arange(rows) * 64 + 512
        batch: Any = RaggedBatch(
            positions=_ints(np.concatenate([start + np.arange(new) for start in before])),
            seq_ids=_ints(np.repeat(np.arange(rows), new)),
            query_starts=_ints(np.arange(rows + 1) * new),
            seq_lens=_ints(before + new),
            num_decodes=_ints(rows if new == 1 else 0),
            num_seqs=_ints(rows),
            decode_only=new == 1,
        )
        num_pages = POOL_BYTES // (PAGE_ROWS * 512)
        ids = np.random.default_rng(0).permutation(np.arange(1, num_pages))
        ids = ids[: rows * (1 + kept) * layout.num_pages].reshape(rows, 1 + kept, layout.num_pages)
        checkpoint_lens = before[:, None] + new * (np.arange(kept) + 1) // (kept + 1)
        blocks = (ids[:, 0], ids[:, 0], checkpoint_lens, ids[:, 1:])
        table: Any = StateTable(*(_ints(values) for values in blocks))
        pages = _shape(num_pages, PAGE_ROWS, 128, dtype=jnp.uint32)
        place: dict[str, Any] = {"layout": layout, "layer_slot": 0, "layer_slots": 1}
        place["implementation"] = "pallas_tpu"
        operation = _OPERATIONS[self.kernel]
        inputs: tuple[Any, ...] = ()
        if self.kernel in ("causal_conv1d", "conv_delta_rule"):
            channels, before = layer.conv
            inputs = (_shape(tokens, channels), _shape(channels, before + 1), _shape(channels))
            place |= {"part": 0, "activation": "silu"}
        if self.kernel != "causal_conv1d":
            place["part"] = 1
            of_state = layer.inputs(tokens)
            inputs = (*inputs, *of_state[3:]) if self.kernel == "conv_delta_rule" else of_state
        if self.kernel == "conv_delta_rule":
            del place["part"]
            place["parts"] = (0, 1)
        if layer.kernel == "gated_delta_rule" and self.kernel != "causal_conv1d":
            place |= {"scale": layer.state[2] ** -0.5, "l2norm_eps": 1e-6}

        def call(pages: Any, inputs: Any, batch: RaggedBatch, table: StateTable) -> Any:
            return operation(*inputs, pages, batch, table, **place)

        return Built(call, (pages, inputs, batch, table), 0)


_QUICK = ("jamba-1.5-mini", "nemotron-3-nano", "qwen3-next-80b/4")
_STEPS: dict[str, dict[str, int]] = {
    "decode": {},
    "prefill": {"sequences": 1, "new": 2048},
    "prefill with checkpoints": {"sequences": 8, "new": 256, "kept": 2},
}
RECURRENT_CASES = {
    f"{model} {conv}{step}": RecurrentCase(
        kernel="causal_conv1d" if conv else layer.kernel,
        layer=layer,
        quick=step == "decode" and model in _QUICK,
        **sizes,
    )
    for model, layer in LAYERS.items()
    for conv in ("conv ", "")
    for step, sizes in _STEPS.items()
    if "kept" not in sizes or model in _MODELS or model in _QUICK
}
RECURRENT_CASES |= {
    f"{model} conv and decode": RecurrentCase(kernel="conv_delta_rule", layer=layer, quick=model in _QUICK)
    for model, layer in LAYERS.items()
    if layer.kernel == "gated_delta_rule"
}
