"""Kernels for CPUs compiled by numba: the call frame, pieces on several threads, buffers written in place."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import njit

from pallas_kernels.cpu import available, frame
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.cpu.memory import load_float32, store_float32

PIECE = 1000


@njit
def _pieces(call):
    return (frame.operand_size(call, 0, 0) + PIECE - 1) // PIECE


@njit(error_model="numpy")
def _axpy(call, piece):
    size = frame.operand_size(call, 0, 0)
    x, y, out = frame.operand(call, 0), frame.operand(call, 1), frame.result(call, 0)
    for i in range(piece * PIECE, min(size, (piece + 1) * PIECE)):
        store_float32(out + 4 * i, np.float32(2) * load_float32(x + 4 * i) + load_float32(y + 4 * i))


axpy = Kernel("jaxkv_test_axpy", _pieces, _axpy)


def twice_x_plus_y(x: jax.Array, y: jax.Array) -> jax.Array:
    return axpy([jax.ShapeDtypeStruct(x.shape, x.dtype)], x, y)[0]


@pytest.mark.parametrize("size", [1, PIECE, PIECE + 1, 64 * PIECE - 1])
def test_every_piece_runs_once(size: int):
    x, y = jnp.arange(size, dtype=jnp.float32), jnp.full(size, 3, jnp.float32)
    np.testing.assert_array_equal(jax.jit(twice_x_plus_y)(x, y), 2 * np.arange(size) + 3)


def test_no_elements_are_no_pieces():
    nothing = jnp.zeros(0, jnp.float32)
    assert jax.jit(twice_x_plus_y)(nothing, nothing).shape == (0,)


def test_calls_of_many_threads_do_not_meet():
    @jax.jit
    def several(x: jax.Array) -> jax.Array:
        return sum((twice_x_plus_y(x + i, x * i) for i in range(12)), jnp.zeros_like(x))

    size = 40 * PIECE
    # The sum over i of 2 (x + i) + x i: 24 x + 132 + 66 x.
    expected = 90 * np.arange(size) + 132
    wrong = []

    def run() -> None:
        for _ in range(20):
            result = np.asarray(several(jnp.arange(size, dtype=jnp.float32)))
            if not np.array_equal(result, expected):
                wrong.append(result)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_result_can_be_written_over_an_operand():
    def step(y: jax.Array) -> jax.Array:
        x = jnp.ones_like(y)
        return axpy([jax.ShapeDtypeStruct(y.shape, y.dtype)], x, y, in_place={1: 0})[0]

    compiled = jax.jit(step, donate_argnums=0).lower(jnp.zeros(8 * PIECE, jnp.float32)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes <= 4 * 8 * PIECE  # x; no copy of y
    y = jnp.zeros(8 * PIECE, jnp.float32)
    for _ in range(3):
        y = compiled(y)
    np.testing.assert_array_equal(y, np.full(8 * PIECE, 6))


def test_vmap_calls_one_after_another_and_leaves_what_is_shared_as_it_was():
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return axpy([jax.ShapeDtypeStruct(y.shape, y.dtype)], x, y, in_place={1: 0})[0]

    x, y = jnp.arange(3 * PIECE, dtype=jnp.float32).reshape(3, PIECE), jnp.full(PIECE, 3, jnp.float32)
    result = jax.jit(jax.vmap(step, in_axes=(0, None)))(x, y)
    np.testing.assert_array_equal(result, 2 * np.arange(3 * PIECE).reshape(3, PIECE) + 3)
    np.testing.assert_array_equal(y, np.full(PIECE, 3))


def test_offsets_are_those_of_the_header():
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()

    def fields(struct: str) -> list[str]:
        body = re.search(rf"struct {struct} \{{(.*?)\n\}};", header, re.DOTALL)
        assert body is not None, struct
        declared = re.sub(r"//[^\n]*", "", body[1])
        api = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)|(\w+);", declared)
        return [function or name for function, name in api]

    def word(struct: str, field: str) -> int:
        return 8 * fields(struct).index(field)

    # Every field is a word but the version of three words: what follows it lies two words further on.
    assert word("XLA_FFI_CallFrame", "extension_start") == frame.FRAME_EXTENSION
    assert word("XLA_FFI_CallFrame", "api") == frame.FRAME_API
    assert word("XLA_FFI_CallFrame", "ctx") == frame.FRAME_CONTEXT
    # Arguments and results are structs of five words each.
    arguments = word("XLA_FFI_CallFrame", "args")
    assert arguments + word("XLA_FFI_Args", "args") == frame.OPERANDS
    assert arguments + 8 * len(fields("XLA_FFI_Args")) + word("XLA_FFI_Rets", "rets") == frame.RESULTS
    assert word("XLA_FFI_Buffer", "data") == frame.BUFFER_DATA
    assert word("XLA_FFI_Buffer", "dims") == frame.BUFFER_DIMS
    version = word("XLA_FFI_Api_Version", "major_version")
    assert word("XLA_FFI_Api", "api_version") + version == frame.API_VERSION
    assert word("XLA_FFI_Metadata", "api_version") + version == frame.METADATA_VERSION
    assert word("XLA_FFI_Metadata", "traits") + 16 == frame.METADATA_TRAITS
    assert word("XLA_FFI_Api", "XLA_FFI_Error_Destroy") + 16 == frame.DESTROY_ERROR
    assert word("XLA_FFI_Api", "XLA_FFI_ThreadPool_Schedule") + 16 == frame.SCHEDULE
    assert word("XLA_FFI_Api", "XLA_FFI_ThreadPool_NumThreads") + 16 == frame.NUM_THREADS


def test_what_cannot_serve_says_why(monkeypatch: pytest.MonkeyPatch):
    assert available.why_not() is None
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: None)
    assert "numba is not installed" in str(available.why_not())


@pytest.mark.parametrize(
    ("numba", "switch", "message"),
    [
        ("raise ImportError('numba needs another numpy')", "0", "numba needs another numpy"),
        (None, "1", "NUMBA_DISABLE_JIT is set"),
    ],
)
def test_a_numba_that_compiles_nothing_is_not_chosen(numba, switch, message, tmp_path: Path):
    if numba is not None:
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text(numba)
    root = Path(available.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", "from pallas_kernels.cpu.available import why_not; print(why_not())"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{root}", "NUMBA_DISABLE_JIT": switch},
        capture_output=True,
        text=True,
        check=True,
    )
    assert message in done.stdout


def test_two_kernels_of_one_name_are_one():
    # As when two threads trace for the first time at once, and both make the kernel.
    def call() -> jax.Array:
        made = Kernel("jaxkv_test_twice", _pieces, _axpy)
        return made([jax.ShapeDtypeStruct((3,), jnp.float32)], jnp.arange(3.0), jnp.ones(3))[0]

    for _ in range(2):
        np.testing.assert_array_equal(call(), [1, 3, 5])
