"""Putting a packaged file together: once, whole, and only in the cache folder."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxkv.engine.loading import packaged
from jaxkv.errors import JaxkvError


@pytest.fixture
def package(monkeypatch, tmp_path: Path) -> SimpleNamespace:
    """A package of two parts that counts how often it is assembled."""
    parts = [tmp_path / "part0", tmp_path / "part1"]
    for part, content in zip(parts, (b"GG", b"UF"), strict=True):
        part.write_bytes(content)
    fake = SimpleNamespace(MODEL_NAME="model.gguf", calls=0, chunk_paths=lambda: parts)

    def assemble(path: Path, overwrite: bool) -> Path:
        fake.calls += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
        return path

    fake.assemble = assemble
    monkeypatch.setitem(sys.modules, packaged.GEMMA3_270M_PACKAGE, fake)
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "cache"))
    return fake


def test_assembled_once_into_the_cache(package, tmp_path):
    path = packaged.gemma3_270m()
    assert path == tmp_path / "cache" / "model.gguf"
    assert path.read_bytes() == b"GGUF"
    assert packaged.gemma3_270m() == path
    assert package.calls == 1
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]


def test_a_file_of_another_size_is_made_again(package):
    path = packaged.gemma3_270m()
    path.write_bytes(b"G")
    assert packaged.gemma3_270m().read_bytes() == b"GGUF"
    assert package.calls == 2


def test_a_failure_leaves_nothing_behind(package, tmp_path):
    def assemble(path: Path, overwrite: bool) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GG")
        raise ValueError("Assembled file sha256 did not match expected value")

    package.assemble = assemble
    with pytest.raises(JaxkvError, match="sha256"):
        packaged.gemma3_270m()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_part_is_named(package):
    package.chunk_paths()[1].unlink()
    with pytest.raises(JaxkvError, match="part1"):
        packaged.gemma3_270m()


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXKV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packaged.cache_directory() == tmp_path / "jaxkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert packaged.cache_directory() == Path.home() / ".cache" / "jaxkv"
