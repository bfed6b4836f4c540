"""Writing small checkpoints, whole and spoilt."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from models.gemma3_names import GGUF_NAMES, HF_NAMES
from scripts.make_tiny_checkpoint import SPECIAL_TOKENS, write_checkpoint

NUM_LAYERS = 2


def tiny_folder(folder: Path) -> Path:
    write_checkpoint("gemma3", folder, num_layers=NUM_LAYERS)
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def save_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def gguf_tensor_names() -> dict[str, str]:
    """The Hugging Face name of every tensor, by its GGUF name."""
    names = {}
    for path, source in GGUF_NAMES.items():
        for gguf_name, hf_name in zip(source.names, HF_NAMES[path].names, strict=True):
            for i in range(NUM_LAYERS):
                names[gguf_name.format(i=i)] = hf_name.format(i=i)
    return names


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a byte vocabulary with a few words."""
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS) + [gguf.TokenType.BYTE] * 256
    return tokens, [0.0] * len(tokens), [int(kind) for kind in types]


def write_gguf(path: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    """The tiny model as the `gguf` package writes it; `tensors` by Hugging Face name, norms stored as 1 + w.

    `changes`: tokens, quantisation (a GGMLQuantizationType for matrices), without (a GGUF tensor left out),
    architecture.
    """
    writer = gguf.GGUFWriter(path, changes.get("architecture", "gemma3"))
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    tokens, scores, types = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(changes.get("tokens", tokens))
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(SPECIAL_TOKENS.index("<bos>"))
    writer.add_eos_token_id(SPECIAL_TOKENS.index("<eos>"))
    writer.add_unk_token_id(SPECIAL_TOKENS.index("<unk>"))
    for name, hf_name in gguf_tensor_names().items():
        if name == changes.get("without"):
            continue
        tensor = tensors[hf_name] + np.float32(hf_name.endswith("norm.weight"))
        quantisation = changes.get("quantisation")
        if quantisation is not None and tensor.ndim == 2 and tensor.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quantize(tensor, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
