"""The tensors of a folder of safetensors files, one or many with an index."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkv.engine.loading.json_file import read_json
from jaxkv.errors import JaxkvError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class _Entry(NamedTuple):
    """Where a tensor is. opened: the file's, held open so that a header is read once, not for each tensor."""

    file: Path
    opened: Any
    stored_name: str
    shape: tuple[int, ...]


class SafetensorsFolder:
    """Tensors by name.

    text_prefixes: what may stand for "model." before the names of the text model in checkpoints that hold
    more.

    Raises JaxkvError where a file is missing, unreadable or truncated.
    """

    def __init__(self, folder: Path, text_prefixes: tuple[str, ...] = ()):
        self._entries: dict[str, _Entry] = {}
        for file in _weight_files(folder):
            with _readable(file):
                opened = safe_open(file, framework="numpy")
                for stored_name in opened.keys():  # noqa: SIM118 (the object is no mapping)
                    shape = tuple(opened.get_slice(stored_name).get_shape())
                    name = _plain_name(stored_name, text_prefixes)
                    self._entries[name] = _Entry(file, opened, stored_name, shape)

    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None where there is no such tensor."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor in the dtype they are stored in."""
        entry = self._entries[name]
        with _readable(entry.file):
            return entry.opened.get_tensor(entry.stored_name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if not single.is_file():
            raise JaxkvError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise JaxkvError(f"{index} has no weight_map of tensor names to file names")
    return [folder / name for name in sorted(set(weight_map.values()))]


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Reading `file` within it fails with a JaxkvError."""
    if not file.is_file():
        raise JaxkvError(f"there is no file {file}")
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise JaxkvError(f"cannot read {file}, which may be truncated: {error}") from error


def _plain_name(name: str, text_prefixes: tuple[str, ...]) -> str:
    for prefix in text_prefixes:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name
