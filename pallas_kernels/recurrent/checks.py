"""Refusing arrays that do not fit each other or the states' layout."""

import jax

from pallas_kernels.batch import RaggedBatch, num_tokens
from pallas_kernels.pool import check_pool
from pallas_kernels.recurrent.state_layout import StateLayout
from pallas_kernels.recurrent.state_place import StatePlace


def place_in(
    pages: jax.Array, layout: StateLayout, part: int, layer_slot: int | jax.Array, layer_slots: int
) -> StatePlace:
    """Where a part is in a pool. ValueError for a place that cannot be, and a pool of other pages."""
    check_pool(pages, layout.page_rows)
    return StatePlace(layout=layout, part=part, layer_slot=layer_slot, layer_slots=layer_slots)


def check_shape(name: str, value: jax.Array, wanted: tuple[int, ...]) -> None:
    """ValueError for an array of another shape."""
    if value.shape != wanted:
        raise ValueError(f"{name} must be {list(wanted)}, got {list(value.shape)}")


def check_part(place: StatePlace, wanted: tuple[int, ...]) -> None:
    """ValueError for a part of another shape."""
    if place.shape != wanted:
        raise ValueError(
            f"part {place.part} of the state must be {list(wanted)} for these inputs, "
            f"the layout has {list(place.shape)}"
        )


def check_convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: str | None,
    batch: RaggedBatch,
    place: StatePlace,
) -> None:
    """ValueError for what is not a convolution of the step's tokens, and for a part that does not fit it."""
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")
    if x.ndim != 2 or weight.ndim != 2:
        raise ValueError(f"x and weight must be [T, C] and [C, K], got {list(x.shape)}, {list(weight.shape)}")
    channels, kernel = weight.shape
    check_shape("x", x, (num_tokens(batch), channels))
    check_part(place, (channels, kernel - 1))
    if bias is not None:
        check_shape("bias", bias, (channels,))
