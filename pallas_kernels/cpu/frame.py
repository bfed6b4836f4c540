"""XLA's call frame, read by functions compiled by numba: operands, results, the interface's own functions.

Offsets are those of `xla/ffi/api/c_api.h`, version 0 of the interface, in bytes on a 64-bit machine; the
header comes with jaxlib (`jax.ffi.include_dir()`), and a test holds these numbers against it.
"""

from numba import njit

from pallas_kernels.cpu.memory import load_int32, load_int64, store_int32

FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT = 8, 16, 24
OPERANDS, RESULTS = 72, 112
BUFFER_DATA, BUFFER_DIMS = 24, 40
API_VERSION = 16 + 16
"""Where the interface keeps its major and minor version: two int32."""
DESTROY_ERROR, SCHEDULE, NUM_THREADS = 64, 136, 144
METADATA_KIND, METADATA_IN_EXTENSION = 1, 24
METADATA_VERSION, METADATA_TRAITS = 8 + 16, 32


@njit(inline="always")
def operand(frame, index):
    """The address of an operand's first element."""
    return load_int64(load_int64(load_int64(frame + OPERANDS) + 8 * index) + BUFFER_DATA)


@njit(inline="always")
def operand_size(frame, index, axis):
    """The size of an operand along an axis."""
    return load_int64(
        load_int64(load_int64(load_int64(frame + OPERANDS) + 8 * index) + BUFFER_DIMS) + 8 * axis
    )


@njit(inline="always")
def result(frame, index):
    """The address of a result's first element."""
    return load_int64(load_int64(load_int64(frame + RESULTS) + 8 * index) + BUFFER_DATA)


@njit(inline="always")
def result_size(frame, index, axis):
    """The size of a result along an axis."""
    return load_int64(
        load_int64(load_int64(load_int64(frame + RESULTS) + 8 * index) + BUFFER_DIMS) + 8 * axis
    )


@njit(inline="always")
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
