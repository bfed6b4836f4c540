"""Which states the GPU kernels serve."""

from pallas_kernels.gpu.support import refuses_gpu
from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.state_place import StatePlace


def refuses_lines(place: StatePlace, key_heads: int) -> str | None:
    """Why the decode kernel does not serve a part with so many key heads (0: none), or None."""
    if (reason := refuses_gpu()) is not None:
        return reason
    blocks, _, lanes = place.layout.stored_shape(place.part)
    if place.layout.dtypes[place.part] != "float32":
        return f"states of {place.layout.dtypes[place.part]} are not float32"
    if lanes % LANES:
        return f"{lanes} channels of a block are not a multiple of {LANES}"
    if key_heads and blocks * lanes // LANES % key_heads:
        return f"{key_heads} key heads do not divide {blocks * lanes // LANES} lines of {LANES} channels"
    if not place.words.are_rows:
        return f"the words {place.words} of part {place.part} are not whole rows of {LANES}"
    return None
