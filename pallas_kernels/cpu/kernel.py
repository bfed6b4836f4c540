"""A kernel that jitted code can call: compiled and made known to XLA when it is first asked for."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import jax

from pallas_kernels.cpu.parallel import make_handler

_lock = Lock()
_known: dict[str, list[Any]] = {}
"""What XLA calls, by name: two threads that trace at once may each have made a kernel of one name."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """`work(frame, piece)` for every piece below `pieces(frame)`, shared out over XLA's threads.

    name: XLA's name of it; kernels of one name do the same, in every process. pieces, work: functions
    compiled by numba (`njit`) over the address of XLA's call frame (`pallas_kernels.cpu.frame`); they must
    not raise. What a piece writes must depend neither on the thread that runs it nor on the order of pieces.
    """

    name: str
    pieces: Any
    work: Any

    def __call__(
        self,
        results: Sequence[jax.ShapeDtypeStruct],
        *operands: jax.Array,
        in_place: dict[int, int] | None = None,
    ) -> Sequence[jax.Array]:
        """What it writes. in_place: by operand, the result that is written over it. Under `vmap` one call
        after another."""
        self._register()
        run = jax.ffi.ffi_call(
            self.name, list(results), input_output_aliases=in_place, vmap_method="sequential"
        )
        return run(*operands)

    def _register(self) -> None:
        with _lock:
            if self.name in _known:
                return
            handler = make_handler(self.name, self.pieces, self.work)
            capsule = ctypes.pythonapi.PyCapsule_New
            capsule.restype = ctypes.py_object
            capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
            target = capsule(handler[0].address, None, None)
            jax.ffi.register_ffi_target(self.name, target, platform="cpu", api_version=1)
            _known[self.name] = handler
