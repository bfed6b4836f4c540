"""Pieces of one call shared out over XLA's own threads.

The calling thread works, too, and waits only for pieces that another thread has begun: a task that a busy
pool starts late finds nothing left. What the tasks share is therefore freed by whoever lets go of it last.
"""

from typing import Any

from numba import cfunc, njit, types

from pallas_kernels.cpu import frame as frames
from pallas_kernels.cpu.memory import (
    allocate,
    atomic_add,
    call,
    free,
    load_int64,
    of_c,
    store_int64,
    words_on_stack,
)

_YIELD = of_c("sched_yield")

# What the tasks of a call share, in bytes from its start: next piece, pieces done, holders, pieces, frame.
_NEXT, _DONE, _HOLDERS, _COUNT, _FRAME, _BYTES = 0, 8, 16, 24, 32, 40


@njit
def _num_threads(frame):
    """Threads of XLA's pool; 1 where there is none."""
    api = load_int64(frame + frames.FRAME_API)
    args = words_on_stack()
    threads = words_on_stack()
    store_int64(threads, 1)
    store_int64(args, 32)
    store_int64(args + 8, 0)
    store_int64(args + 16, load_int64(frame + frames.FRAME_CONTEXT))
    store_int64(args + 24, threads)
    error = call(load_int64(api + frames.NUM_THREADS), args)
    if error != 0:
        _destroy(frame, error)
        return 1
    return load_int64(threads)


@njit
def _schedule(frame, task, shared):
    """Whether XLA's pool took a task."""
    args = words_on_stack()
    store_int64(args, 40)
    store_int64(args + 8, 0)
    store_int64(args + 16, load_int64(frame + frames.FRAME_CONTEXT))
    store_int64(args + 24, task)
    store_int64(args + 32, shared)
    error = call(load_int64(load_int64(frame + frames.FRAME_API) + frames.SCHEDULE), args)
    if error != 0:
        _destroy(frame, error)
    return error == 0


@njit
def _destroy(frame, error):
    args = words_on_stack()
    store_int64(args, 24)
    store_int64(args + 8, 0)
    store_int64(args + 16, error)
    call(load_int64(load_int64(frame + frames.FRAME_API) + frames.DESTROY_ERROR), args)


@njit
def _let_go(shared):
    if atomic_add(shared + _HOLDERS, -1) == 1:
        free(shared)


def make_handler(pieces: Any, work: Any) -> list[Any]:
    """An FFI handler of XLA that runs `work(frame, piece)` for every piece below `pieces(frame)`.

    pieces, work: compiled by numba; they must not raise. Returns its C function, then what must live as long.
    """

    @njit(nogil=True, error_model="numpy")
    def take(shared):
        count = load_int64(shared + _COUNT)
        frame = load_int64(shared + _FRAME)
        piece = atomic_add(shared + _NEXT, 1)
        while piece < count:
            work(frame, piece)
            atomic_add(shared + _DONE, 1)
            piece = atomic_add(shared + _NEXT, 1)

    @cfunc(types.void(types.int64), nogil=True, error_model="numpy")
    def task(shared):
        take(shared)
        _let_go(shared)

    task_address = task.address

    @cfunc(types.int64(types.int64), nogil=True, error_model="numpy")
    def handler(frame):
        if frames.only_asks_version(frame):
            return 0
        count = pieces(frame)
        helpers = min(count, _num_threads(frame)) - 1 if count > 1 else 0
        if helpers <= 0:
            for piece in range(count):
                work(frame, piece)
            return 0
        shared = allocate(_BYTES)
        store_int64(shared + _NEXT, 0)
        store_int64(shared + _DONE, 0)
        store_int64(shared + _HOLDERS, helpers + 1)
        store_int64(shared + _COUNT, count)
        store_int64(shared + _FRAME, frame)
        for _ in range(helpers):
            if not _schedule(frame, task_address, shared):
                _let_go(shared)
        take(shared)
        while atomic_add(shared + _DONE, 0) < count:
            call(_YIELD, 0)
        _let_go(shared)
        return 0

    return [handler, task]
