"""Writes a tiny model with random weights as a Hugging Face folder, for tests and for trying the engine.

    python scripts/make_tiny_checkpoint.py --model gemma3 --out DIR [--seed 0] [--layers N]

The folder holds config.json, model.safetensors (float32), tokenizer.json and generation_config.json. The
tokenizer knows the bytes and Gemma's special tokens, so any text can be encoded.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.tiny_models import MODELS
from scripts.tiny_models.vocabulary import END_TOKEN_IDS, SPECIAL_TOKENS


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


def write_checkpoint(model: str, folder: Path, *, seed: int = 0, num_layers: int | None = None) -> None:
    """Makes `folder` and writes the four files into it; `num_layers` is the model's own unless given."""
    tiny = MODELS[model]
    config = tiny.config(tiny.NUM_LAYERS if num_layers is None else num_layers)
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.standard_normal(drawn.shape) * drawn.deviation + drawn.mean).astype(np.float32)
        for name, drawn in tiny.tensors(config).items()
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
    parser.add_argument("--layers", type=int, metavar="N")
    args = parser.parse_args()
    write_checkpoint(args.model, args.out, seed=args.seed, num_layers=args.layers)


if __name__ == "__main__":
    main()
