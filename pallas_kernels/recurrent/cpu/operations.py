"""The operations by kernels that numba compiles, which is imported when one of them is first traced."""

from typing import Any

from pallas_kernels.cpu.available import why_not
from pallas_kernels.recurrent.conv_delta import ConvDeltaPlace
from pallas_kernels.recurrent.cpu.units import LANES, Units, cut
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace


def selective_scan_numba(*step: Any) -> StepResult:
    """Same contract as `selective_scan_reference`."""
    from pallas_kernels.recurrent.cpu.selective import selective_scan_numba as run

    return run(*step)


def ssd_numba(*step: Any) -> StepResult:
    """Same contract as `ssd_reference`."""
    from pallas_kernels.recurrent.cpu.ssd import ssd_numba as run

    return run(*step)


def gated_delta_rule_numba(*step: Any) -> StepResult:
    """Same contract as `gated_delta_rule_reference`, but queries and keys are still to be scaled."""
    from pallas_kernels.recurrent.cpu.delta import gated_delta_rule_numba as run

    return run(*step)


def refuses_columns(place: StatePlace, key_heads: int) -> str | None:
    """Why Mamba 1's kernel does not serve a part, or None."""
    del key_heads
    if (reason := why_not()) is not None:
        return reason
    units = cut(place, matrices=False)
    return None if isinstance(units, Units) else units


def refuses_heads(place: StatePlace, key_heads: int) -> str | None:
    """Why the kernels of matrices do not serve a part, or None."""
    del key_heads
    if (reason := why_not()) is not None:
        return reason
    _, head_size, size = place.shape
    if head_size % LANES or size % LANES:
        return f"channels {head_size} and key size {size} of a head are not multiples of {LANES}"
    units = cut(place, matrices=True)
    return None if isinstance(units, Units) else units


def refuses_beside_convolution(place: ConvDeltaPlace, key_heads: int) -> str | None:
    """Why the delta rule's kernel does not follow XLA's convolution, or None."""
    if not place.conv.words.are_rows:
        return "the convolution's state is no whole rows: between it and a kernel XLA would copy the pool"
    return refuses_heads(place.state, key_heads)
