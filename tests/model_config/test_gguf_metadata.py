import struct
from pathlib import Path

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.model_config.gguf_metadata import gguf_config, read_gguf_metadata
from jaxkv.model_config.sources import find_config


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value_type: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + data


def gguf(*entries: bytes, version: int = 3, tensors: tuple[bytes, ...] = ()) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join((*entries, *tensors))


def tensor(name: str, offset: int) -> bytes:
    """16 values of float32 as the header lists them."""
    return text(name) + struct.pack("<IQIQ", 1, 16, 0, offset)


def u32(key: str, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


GEMMA3 = (
    entry("general.architecture", 8, text("gemma3")),
    u32("gemma3.block_count", 18),
    u32("gemma3.context_length", 32768),
    u32("gemma3.attention.head_count", 4),
    # A list of strings, one of numbers and one of lists stand before keys that are needed.
    entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("<pad>") + text("é")),
    entry("tokenizer.ggml.scores", 9, struct.pack("<IQ3f", 6, 3, 0.5, 1, 2)),
    entry("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2H", 2, 2, 1, 2)),
    u32("gemma3.attention.head_count_kv", 1),
    u32("gemma3.attention.key_length", 256),
    u32("gemma3.attention.sliding_window", 512),
    entry("general.flag", 7, b"\x01"),
)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_metadata_becomes_a_config(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", gguf(*GEMMA3))
    assert gguf_config(path) == {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 18,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
    }
    assert read_gguf_metadata(path)["general.flag"] is True
    assert find_config(str(path)).name == "model"


def test_the_file_is_known_by_its_beginning_too(tmp_path: Path) -> None:
    assert find_config(str(write(tmp_path / "weights", gguf(*GEMMA3)))).config["head_dim"] == 256


@pytest.mark.parametrize("length", [3, 10, 30, 60, 150, 300, -1])
def test_a_file_cut_off_within_its_metadata_is_refused(tmp_path: Path, length: int) -> None:
    data = gguf(*GEMMA3)
    with pytest.raises(JaxkvError, match=r"breaks off within its metadata|is not a GGUF file"):
        gguf_config(write(tmp_path / "cut.gguf", data[:length]))


def test_a_file_cut_off_before_its_last_tensor_is_refused(tmp_path: Path) -> None:
    head = gguf(*GEMMA3, tensors=(tensor("a", 0), tensor("b", 64)))
    start = -(-len(head) // 32) * 32
    whole = head.ljust(start, b"\0") + bytes(128)
    assert gguf_config(write(tmp_path / "whole.gguf", whole))["num_hidden_layers"] == 18
    with pytest.raises(
        JaxkvError, match=f"breaks off: tensor b begins at byte {start + 64}, the file has {start}"
    ):
        gguf_config(write(tmp_path / "cut.gguf", whole[:start]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(20), "is not a GGUF file"),
        (gguf(version=1), "GGUF version 1"),
        (gguf(entry("a", 77, b"")), "unknown type 77"),
        (gguf(entry("general.architecture", 8, text("mpt"))), "unknown general.architecture 'mpt'"),
        (gguf(), "unknown general.architecture None"),
        (gguf(entry("a", 8, struct.pack("<Q", 2**60))), "breaks off"),
        (gguf(entry("a", 9, struct.pack("<IQ", 10, 2**62))), "breaks off"),
        (gguf(entry("a", 9, struct.pack("<IQ", 9, 1) * 5000)), "nested too deep"),
        (gguf(entry("a", 8, struct.pack("<Q", 1) + b"\xff")), "no UTF-8"),
    ],
)
def test_files_that_are_no_usable_gguf_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(JaxkvError, match=message):
        gguf_config(write(tmp_path / "bad.gguf", data))
