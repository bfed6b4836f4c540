"""Machine code of kernels on disk: the next process loads it, unless anything it depends on has changed."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels.cpu import stored

ROOT = Path(stored.__file__).parents[2]
KERNEL = """
from numba import njit
import numpy as np
from pallas_kernels.cpu import frame
from pallas_kernels.cpu.kernel import Kernel
from pallas_kernels.cpu.memory import load_float32, store_float32

@njit
def pieces(call):
    return frame.operand_size(call, 0, 0)

@njit
def work(call, piece):
    x = load_float32(frame.operand(call, 0) + 4 * piece)
    store_float32(frame.result(call, 0) + 4 * piece, x * np.float32(FACTOR))

multiply = Kernel("jaxkv_test_multiply", pieces, work)
"""
USE = """
import json
import jax, jax.numpy as jnp
import kernel
from pallas_kernels.cpu.kernel import _known

x = jnp.arange(1000.0)
out = jax.jit(lambda x: kernel.multiply([jax.ShapeDtypeStruct(x.shape, x.dtype)], x)[0])(x)
factors = sorted(set((out[1:] / x[1:]).tolist()))
print(json.dumps([factors, [made.stored for made in _known["jaxkv_test_multiply"]]]))
"""


def use(folder: Path, factor: float, script: str = USE) -> tuple[list[float], list[bool]]:
    """What a process of its own finds that the kernel multiplies by, and which functions it only loaded: the
    handler, the work, and the two that all kernels share.
    """
    (folder / "kernel.py").write_text(KERNEL.replace("FACTOR", str(factor)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    factors, loaded = json.loads(done.stdout)
    return factors, loaded


def test_the_next_process_loads_what_is_still_right(tmp_path: Path) -> None:
    assert use(tmp_path, 2.0) == ([2.0], [False] * 4)
    assert use(tmp_path, 2.0) == ([2.0], [True] * 4)
    # Another kernel of that name: what all share is the same.
    assert use(tmp_path, 3.0) == ([3.0], [False, False, True, True])
    for path in (tmp_path / "cache" / "numba").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert use(tmp_path, 3.0) == ([3.0], [False] * 4)
    # The damaged files were written again, in place of the old ones.
    names = [path.name for path in (tmp_path / "cache" / "numba").iterdir()]
    assert len(names) == 6
    assert all(len(name) == 64 for name in names)


def test_nothing_is_kept_of_sources_that_have_changed_since_they_were_imported(tmp_path: Path) -> None:
    package = Path(stored.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    change = "open('pallas_kernels/cpu/frame.py', 'a').write('# changed')"
    assert use(tmp_path, 2.0, USE.replace("x = jnp", f"{change}\nx = jnp", 1)) == ([2.0], [False] * 4)
    assert not (tmp_path / "cache" / "numba").exists()
    assert use(tmp_path, 2.0) == ([2.0], [False] * 4)
    assert len([*(tmp_path / "cache" / "numba").iterdir()]) == 4


@pytest.fixture
def folder(tmp_path: Path):
    """The folder that JAX is told of."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    for name, value in zip(("compilation_cache_dir", "enable_compilation_cache"), before, strict=True):
        jax.config.update(f"jax_{name}", value)


def path_of(name: str) -> Path | None:
    return stored._path(name, "a signature", [use])


def test_code_has_a_file_for_all_that_it_depends_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = path_of("a")
    assert first is not None
    assert first.parent == folder / "numba"
    assert path_of("a") == first
    assert path_of("b") != first
    settings: Any = stored.config
    changes = [(stored.numba, "__version__", "0.0"), (settings, "OPT", type(settings.OPT)(0))]
    for module, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert path_of("a") != first, name


def test_nothing_is_kept_where_jax_keeps_nothing(folder: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/compiled")
    assert path_of("a") is None
    jax.config.update("jax_compilation_cache_dir", None)
    assert path_of("a") is None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_enable_compilation_cache", False)
    assert path_of("a") is None


def test_a_folder_that_cannot_be_written_is_said_and_left_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "numba").write_text("not a folder")
    path = path_of("a")
    assert path is not None
    assert stored._read(path) is None
    with caplog.at_level(logging.WARNING):
        stored._write(path, ["symbol", b"code"])
    assert "compiled kernels are not kept in" in caplog.text
    assert (folder / "numba").read_text() == "not a folder"


@pytest.mark.parametrize("content", [b"", b"short", bytes(100)])
def test_what_was_not_written_whole_is_not_read(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "numba" / "code"
    stored._write(path, ["symbol", b"code"])
    assert stored._read(path) == ["symbol", b"code"]
    path.write_bytes(content)
    assert stored._read(path) is None
