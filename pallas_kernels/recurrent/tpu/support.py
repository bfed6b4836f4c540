"""Which states the TPU kernels serve."""

from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.conv_delta import ConvDeltaPlace
from pallas_kernels.recurrent.state_place import StatePlace


def is_packed(place: StatePlace) -> bool:
    """Whether a word holds two elements."""
    return place.layout.dtypes[place.part] == "bfloat16"


def refuses_rows(place: StatePlace, key_heads: int = 0) -> str | None:
    """Why a part cannot be moved in rows of 128 words, or None."""
    del key_heads
    if not place.words.are_rows:
        return f"the words {place.words} of part {place.part} are not whole rows of {LANES}"
    return None


def refuses_matrices(place: StatePlace, key_heads: int) -> str | None:
    """Why a part `[H, P, size]` with so many key heads (Mamba 2: groups) is not served, or None."""
    blocks, size, lanes = place.layout.stored_shape(place.part)
    if blocks % key_heads:
        return f"{key_heads} key heads do not divide {blocks} blocks of {LANES} channels"
    if lanes != LANES:
        return f"{place.shape[1]} channels a head do not fill {LANES} lanes"
    if size % 8:
        return f"a key size of {size} is not a multiple of 8"
    if is_packed(place) and blocks % 2:
        return f"{blocks} blocks of bfloat16 are not an even number"
    return refuses_rows(place)


def refuses_delta(place: StatePlace, key_heads: int) -> str | None:
    """Why a part `[Hv, dv, dk]` of the delta rule is not served, or None."""
    if place.shape[1] != LANES:
        return f"values of {place.shape[1]} are not {LANES}"
    return refuses_matrices(place, key_heads)


def refuses_selective(place: StatePlace, key_heads: int) -> str | None:
    """Why a part `[C, N]` of Mamba 1 is not served, or None."""
    del key_heads
    channels, size = place.shape
    if channels % (8 * LANES):
        return f"{channels} channels are not a multiple of {8 * LANES}"
    if is_packed(place) and size % 2:
        return f"a state size of {size} in bfloat16 is not even"
    return refuses_rows(place)


def refuses_conv_delta(place: ConvDeltaPlace, key_heads: int) -> str | None:
    """Why a convolution and the delta rule after it are not served, or None."""
    return refuses_rows(place.conv) or refuses_delta(place.state, key_heads)
