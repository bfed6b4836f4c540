"""The operations by kernels that numba compiles, which is imported when one of them is first traced."""

from typing import Any

from pallas_kernels.cpu.available import why_not
from pallas_kernels.recurrent.cpu.units import Units, cut
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace


def selective_scan_numba(*step: Any) -> StepResult:
    """Same contract as `selective_scan_reference`."""
    from pallas_kernels.recurrent.cpu.selective import selective_scan_numba as run

    return run(*step)


def refuses_columns(place: StatePlace, key_heads: int) -> str | None:
    """Why Mamba 1's kernel does not serve a part, or None."""
    del key_heads
    if (reason := why_not()) is not None:
        return reason
    units = cut(place, matrices=False)
    return None if isinstance(units, Units) else units
