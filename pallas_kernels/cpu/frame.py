"""XLA's call frame, read by functions compiled by numba: operands, results, the interface's own functions.

Offsets are those of `xla/ffi/api/c_api.h`, version 0 of the interface, in bytes on a 64-bit machine; the
header comes with jaxlib (`jax.ffi.include_dir()`), and a test holds these numbers against it.
"""

from typing import Any

from numba import types

from pallas_kernels.cpu.instruction import compiled, instruction
from pallas_kernels.cpu.memory import INT64, load_int32, load_int64, store_int32

FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT = 8, 16, 24
OPERANDS, RESULTS = 72, 112
BUFFER_DATA, BUFFER_DIMS = 24, 40
API_VERSION = 16 + 16
"""Where the interface keeps its major and minor version: two int32."""
DESTROY_ERROR, SCHEDULE, NUM_THREADS = 64, 136, 144
METADATA_KIND, METADATA_IN_EXTENSION = 1, 24
METADATA_VERSION, METADATA_TRAITS = 8 + 16, 32


@instruction(types.int64, types.int64, types.int64)
def operand(builder: Any, call: Any, index: Any) -> Any:
    """The address of an operand's first element."""
    return address_of_operand(builder, call, index)


@instruction(types.int64, types.int64, types.int64, types.int64)
def operand_size(builder: Any, call: Any, index: Any, axis: Any) -> Any:
    """The size of an operand along an axis."""
    return _size(builder, _buffer(builder, call, OPERANDS, index), axis)


@instruction(types.int64, types.int64, types.int64)
def result(builder: Any, call: Any, index: Any) -> Any:
    """The address of a result's first element."""
    return _word(builder, _buffer(builder, call, RESULTS, index), BUFFER_DATA)


@instruction(types.int64, types.int64, types.int64, types.int64)
def result_size(builder: Any, call: Any, index: Any, axis: Any) -> Any:
    """The size of a result along an axis."""
    return _size(builder, _buffer(builder, call, RESULTS, index), axis)


def address_of_operand(builder: Any, call: Any, index: Any) -> Any:
    """The same as an instruction of others."""
    return _word(builder, _buffer(builder, call, OPERANDS, index), BUFFER_DATA)


def _word(builder: Any, address: Any, offset: int) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, INT64(offset)), INT64.as_pointer()))


def _buffer(builder: Any, call: Any, buffers: int, index: Any) -> Any:
    return _word(builder, builder.add(_word(builder, call, buffers), builder.shl(index, INT64(3))), 0)


def _size(builder: Any, buffer: Any, axis: Any) -> Any:
    sizes = _word(builder, buffer, BUFFER_DIMS)
    return _word(builder, builder.add(sizes, builder.shl(axis, INT64(3))), 0)


@compiled
def only_asks_version(frame):
    """Whether a call only asks for the interface's version, which is then answered: the caller's own."""
    extension = load_int64(frame + FRAME_EXTENSION)
    if extension == 0 or load_int32(extension + 8) != METADATA_KIND:
        return False
    metadata = load_int64(extension + METADATA_IN_EXTENSION)
    api = load_int64(frame + FRAME_API)
    store_int32(metadata + METADATA_VERSION, load_int32(api + API_VERSION))
    store_int32(metadata + METADATA_VERSION + 4, load_int32(api + API_VERSION + 4))
    store_int32(metadata + METADATA_TRAITS, 0)
    return True
