"""Pieces of one call shared out over XLA's own threads.

The calling thread works, too, and waits only for pieces that another thread has begun: a task that a busy
pool starts late finds nothing left. What the tasks share is therefore freed by whoever lets go of it last.
"""

from functools import cache
from typing import Any

from numba import types

from pallas_kernels.cpu import frame as frames
from pallas_kernels.cpu.instruction import compiled
from pallas_kernels.cpu.memory import (
    address_of,
    allocate,
    atomic_add,
    call,
    call_with_three,
    call_with_two,
    free,
    load_int64,
    store_int64,
    words_on_stack,
)
from pallas_kernels.cpu.stored import CFunction, c_function, publish

_YIELD = address_of("sched_yield")
_TASK, _SHARE_OUT = address_of("jaxkv_task"), address_of("jaxkv_share_out")

# What the tasks of a call share, in bytes from its start: next piece, pieces done, holders, pieces, frame,
# work.
_NEXT, _DONE, _HOLDERS, _COUNT, _FRAME, _WORK, _BYTES = 0, 8, 16, 24, 32, 40, 48


@compiled
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


@compiled
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


@compiled
def _destroy(frame, error):
    args = words_on_stack()
    store_int64(args, 24)
    store_int64(args + 8, 0)
    store_int64(args + 16, error)
    call(load_int64(load_int64(frame + frames.FRAME_API) + frames.DESTROY_ERROR), args)


@compiled
def _let_go(shared):
    if atomic_add(shared + _HOLDERS, -1) == 1:
        free(shared)


@compiled
def _take(shared):
    count, frame, work = load_int64(shared + _COUNT), load_int64(shared + _FRAME), load_int64(shared + _WORK)
    piece = atomic_add(shared + _NEXT, 1)
    while piece < count:
        call_with_two(work, frame, piece)
        atomic_add(shared + _DONE, 1)
        piece = atomic_add(shared + _NEXT, 1)


def _task(shared):
    _take(shared)
    _let_go(shared)


def _share_out(frame, count, work):
    """Runs `work(frame, piece)`, a C function at an address, for every piece below `count`."""
    helpers = min(count, _num_threads(frame)) - 1 if count > 1 else 0
    if helpers <= 0:
        for piece in range(count):
            call_with_two(work, frame, piece)
        return
    shared = allocate(_BYTES)
    store_int64(shared + _NEXT, 0)
    store_int64(shared + _DONE, 0)
    store_int64(shared + _HOLDERS, helpers + 1)
    store_int64(shared + _COUNT, count)
    store_int64(shared + _FRAME, frame)
    store_int64(shared + _WORK, work)
    for _ in range(helpers):
        if not _schedule(frame, _TASK(), shared):
            _let_go(shared)
    _take(shared)
    while atomic_add(shared + _DONE, 0) < count:
        call(_YIELD(), 0)
    _let_go(shared)


@cache
def _shared_functions() -> list[CFunction]:
    """What all handlers call, made known."""
    task = c_function("jaxkv_task", types.void(types.int64), _task)
    publish("jaxkv_task", task.address)
    share_out = c_function("jaxkv_share_out", types.void(types.int64, types.int64, types.int64), _share_out)
    publish("jaxkv_share_out", share_out.address)
    return [task, share_out]


def make_handler(name: str, pieces: Any, work: Any) -> list[CFunction]:
    """An FFI handler of XLA that runs `work(frame, piece)` for every piece below `pieces(frame)`.

    name: of these functions, in this process and in others. pieces, work: compiled by numba; they must not
    raise. Returns the handler, then what must live as long.
    Functions of C call each other by address here: numba compiles again whatever its own functions call.
    """
    shared = _shared_functions()
    symbol = f"{name}_work"
    work_of_c = c_function(symbol, types.void(types.int64, types.int64), work.py_func)
    publish(symbol, work_of_c.address)
    work_address = address_of(symbol)

    def handler(frame):
        if not frames.only_asks_version(frame):
            call_with_three(_SHARE_OUT(), frame, pieces(frame), work_address())
        return 0

    return [c_function(name, types.int64(types.int64), handler, pieces), work_of_c, *shared]
