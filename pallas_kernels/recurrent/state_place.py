"""Where one part of one layer's states is in the pool."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent.state_layout import PartWords, StateLayout


@dataclass(frozen=True, kw_only=True)
class StatePlace:
    """Part number `part` of a layer whose first page is in `layer_slot`.

    Page k of the layer is in slot `(layer_slot + k) % layer_slots` of block number
    `(layer_slot + k) // layer_slots` of those that hold a state. `layer_slot` is an int, or a traced int32
    scalar where layers are scanned; it may be `layer_slots` or more where states are spread over several
    blocks. Raises ValueError for a part or a slot that cannot be.
    """

    layout: StateLayout
    part: int
    layer_slot: int | jax.Array
    layer_slots: int

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.layout.num_parts:
            raise ValueError(f"part must be in [0, {self.layout.num_parts}), got {self.part}")
        if self.layer_slots < 1:
            raise ValueError(f"layer_slots must be at least 1, got {self.layer_slots}")
        if isinstance(self.layer_slot, int) and self.layer_slot < 0:
            raise ValueError(f"layer_slot must be at least 0, got {self.layer_slot}")

    @property
    def words(self) -> PartWords:
        """The part's words within the state's pages."""
        return self.layout.parts[self.part]

    @property
    def shape(self) -> tuple[int, ...]:
        """The part's shape."""
        return self.layout.shapes[self.part]

    def page_ids(self, blocks: jax.Array) -> jax.Array:
        """Pages `[..., num_pages]` of the states in `blocks` `[..., P]`."""
        slots = self.layer_slot + jnp.arange(self.layout.num_pages, dtype=jnp.int32)
        return blocks[..., slots // self.layer_slots] * self.layer_slots + slots % self.layer_slots
