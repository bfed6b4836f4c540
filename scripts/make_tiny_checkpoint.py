"""Writes a tiny model with random weights as a Hugging Face folder, for tests and for trying the engine.

    python scripts/make_tiny_checkpoint.py --model gemma3 --out DIR [--seed 0] [--layers 4]

The folder holds config.json, model.safetensors (float32), tokenizer.json and generation_config.json. The
weights have a standard deviation of 0.15: with the usual 0.02 all logits of a tiny model are nearly equal and
hide errors. The tokenizer knows the bytes and Gemma's special tokens, so any text can be encoded.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

STANDARD_DEVIATION = 0.15
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
END_TOKEN_IDS = [SPECIAL_TOKENS.index("<eos>"), SPECIAL_TOKENS.index("<end_of_turn>")]


def gemma3_config(num_layers: int) -> dict[str, Any]:
    """Every second layer full, windows of 8 tokens, and every option of the family switched on."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
        "max_position_embeddings": 4096,
        "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
        "eos_token_id": END_TOKEN_IDS,
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
    }


def gemma3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Gemma3ForCausalLM checkpoint, matrices as [out, in]."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.pre_feedforward_layernorm.weight": (hidden,),
            f"{layer}.post_feedforward_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q_size, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_size, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_size, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q_size),
            f"{layer}.self_attn.q_norm.weight": (head,),
            f"{layer}.self_attn.k_norm.weight": (head,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


MODELS: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "gemma3": (gemma3_config, gemma3_shapes),
}


def byte_tokenizer() -> Tokenizer:
    """Special tokens first, then one token for each byte, written <0x00> to <0xFF>."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {f"<0x{byte:02X}>": len(SPECIAL_TOKENS) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write_checkpoint(model: str, folder: Path, *, seed: int = 0, num_layers: int = 4) -> None:
    """Makes `folder` and writes the four files into it."""
    make_config, make_shapes = MODELS[model]
    config = make_config(num_layers)
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.standard_normal(shape) * STANDARD_DEVIATION).astype(np.float32)
        for name, shape in make_shapes(config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_TOKEN_IDS}) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny model with random weights.")
    parser.add_argument("--model", choices=sorted(MODELS), default="gemma3")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    write_checkpoint(args.model, args.out, seed=args.seed, num_layers=args.layers)


if __name__ == "__main__":
    main()
