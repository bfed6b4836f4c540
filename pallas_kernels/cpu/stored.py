"""C functions compiled by numba, and their machine code on disk: the next process only loads them.

They lie where JAX keeps what XLA compiled, if its persistent cache is on (`jax_compilation_cache_dir`). The
name of a file is a digest of what its code depends on: the sources of this package and of the function, what
it is called, numba, LLVM, the processor, numba's settings. Constants that a running program changes, or that
a function from outside this package imports, are not seen. A process beside which the package's sources have
changed keeps nothing. A file that is damaged, or cannot be read or written, only means compiling.
"""

import hashlib
import inspect
import json
import logging
import marshal
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import llvmlite
import llvmlite.binding
import numba
from numba import cfunc
from numba.core import config, registry

logger = logging.getLogger(__name__)

_FOLDER = "numba"
_DIGEST_BYTES = 32
_PACKAGE = Path(__file__).parents[1]


class CFunction(NamedTuple):
    """A function of C. address: of its code, which lasts as long as `code`. stored: it was only loaded."""

    address: int
    code: Any
    stored: bool


def c_function(name: str, signature: Any, function: Callable[..., Any], *parts: Any) -> CFunction:
    """A function of C that does what the Python `function` does, which must not raise.

    name: other code has another name, but for code of other versions. parts: functions compiled by numba that
    it calls and that are not of this package.
    """
    path = _path(name, signature, [function, *(part.py_func for part in parts)])
    stored = None if path is None else _read(path)
    code: Any
    if stored is not None:
        symbol, *state = stored
        code = _compiler().unserialize_library(state)
    else:
        with _second_level():
            made: Any = cfunc(signature, nogil=True, error_model="numpy")(function)
        code, symbol = made._library, made.native_name
        # Code that names addresses of this process is of no use to another one, nor is that of old sources.
        if path is not None and not code.has_dynamic_globals and _of_package() == _SOURCES:
            _write(path, [symbol, *code.serialize_using_object_code()])
    return CFunction(code.get_pointer_to_function(symbol), code, stored is not None)


def publish(symbol: str, address: int) -> None:
    """The address that `memory.address_of` the symbol gives from now on."""
    llvmlite.binding.add_symbol(symbol, address)


@contextmanager
def _second_level() -> Iterator[None]:
    """LLVM's second level of optimisation for what numba compiles meanwhile.

    The third of LLVM 22.1 lost a load (it stored poison) in a kernel whose loop had 1 or 8 turns; kernels are
    not slower on the second.
    """
    settings: Any = config
    level = settings.OPT
    settings.OPT = type(level)(min(2, level))
    try:
        yield
    finally:
        settings.OPT = level


def _path(name: str, signature: Any, functions: list[Callable[..., Any]]) -> Path | None:
    """The file of a function's code; None where nothing is kept."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache or "://" in folder:
        return None
    try:
        sources = [_digest(Path(inspect.getfile(function))) for function in functions]
        known = [_SOURCES, sources, name, str(signature), _environment()]
    except (OSError, TypeError):  # as of a package in an archive
        return None
    return Path(folder) / _FOLDER / hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _of_package() -> list[str]:
    return [_digest(path) for path in sorted(_PACKAGE.rglob("*.py"))]


_SOURCES = _of_package()
"""As they were when kernels were imported."""


def _environment() -> list[str]:
    settings = {key: value for key, value in vars(config).items() if key.isupper()}
    simple = {key: value for key, value in settings.items() if isinstance(value, int | float | str)}
    machine = str(_compiler().magic_tuple())
    return [numba.__version__, llvmlite.__version__, sys.version, machine, str(sorted(simple.items()))]


def _compiler() -> Any:
    context: Any = registry.cpu_target.target_context
    context.refresh()  # or symbols of numba's runtime would be missing
    return context.codegen()


def _read(path: Path) -> Any:
    """What `_write` has put there; None where that is not there, or is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return marshal.loads(data) if hashlib.sha256(data).digest() == digest else None


def _write(path: Path, state: list[Any]) -> None:
    """All of it or nothing, whoever else writes it at the same time."""
    data = marshal.dumps(state)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(data).digest() + data)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        logger.warning("compiled kernels are not kept in %s: %s", path.parent, error)
