"""What does not change from step to step: the static half of an operation's arguments."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.layout import AttentionPageLayout


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """One layer's attention: where its pages are and what is computed over them.

    `layer_slot` is an int, or a traced int32 scalar where layers are scanned; page of block b is
    `b * layer_slots + layer_slot`. A token sees the last `sliding_window` positions, its own included, or
    those of its own chunk of `attention_chunk_size` positions (chunked local attention), or, with neither,
    all up to its own. `softcap` c makes scores `c * tanh(score / c)` after `scale`. `sinks [Hq]`, where
    given, is a score for each query head that takes part in the softmax and has no value.
    """

    layout: AttentionPageLayout
    layer_slot: int | jax.Array
    layer_slots: int
    scale: float = 1.0
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None

    def __post_init__(self) -> None:
        if self.layer_slots < 1:
            raise ValueError(f"layer_slots must be at least 1, got {self.layer_slots}")
        if isinstance(self.layer_slot, int) and not 0 <= self.layer_slot < self.layer_slots:
            raise ValueError(f"layer_slot must be in [0, {self.layer_slots}), got {self.layer_slot}")
        for name in ("sliding_window", "attention_chunk_size"):
            span = getattr(self, name)
            if span is not None and span < 1:
                raise ValueError(f"{name} must be at least 1, got {span}")
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ValueError(
                "a layer has a sliding window or chunks, not both: "
                f"sliding_window={self.sliding_window}, attention_chunk_size={self.attention_chunk_size}"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0, got {self.softcap}")

    @property
    def span(self) -> int | None:
        """The most positions that a token sees; None where there is no limit."""
        return self.attention_chunk_size if self.sliding_window is None else self.sliding_window

    def first_visible(self, position: jax.Array) -> jax.Array:
        """The first position that a token at `position` sees, for int32 arrays of any shape."""
        if self.sliding_window is not None:
            return jnp.maximum(position - (self.sliding_window - 1), 0)
        if self.attention_chunk_size is not None:
            return position // self.attention_chunk_size * self.attention_chunk_size
        return jnp.zeros_like(position)

    def sinks_by_row(self, heads: int, tokens: int) -> jax.Array | None:
        """Sinks of rows `token * group + member` of each KV head, float32 `[heads, tokens * group]`."""
        if self.sinks is None:
            return None
        return jnp.tile(jnp.asarray(self.sinks, jnp.float32).reshape(heads, -1), (1, tokens))
