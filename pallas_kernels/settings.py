"""What does not change from step to step: the static half of an operation's arguments."""

from dataclasses import dataclass

import jax

from pallas_kernels.layout import AttentionPageLayout


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """One layer's attention: where its pages are and what is computed over them.

    `layer_slot` is an int, or a traced int32 scalar where layers are scanned; page of block b is
    `b * layer_slots + layer_slot`. A token sees the last `sliding_window` positions, its own included (None:
    all). `softcap` c makes scores `c * tanh(score / c)` after `scale`.
    """

    layout: AttentionPageLayout
    layer_slot: int | jax.Array
    layer_slots: int
    scale: float = 1.0
    sliding_window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.layer_slots < 1:
            raise ValueError(f"layer_slots must be at least 1, got {self.layer_slots}")
        if isinstance(self.layer_slot, int) and not 0 <= self.layer_slot < self.layer_slots:
            raise ValueError(f"layer_slot must be in [0, {self.layer_slots}), got {self.layer_slot}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0, got {self.softcap}")
