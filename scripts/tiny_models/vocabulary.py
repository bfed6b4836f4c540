"""The vocabulary of all tiny models: special tokens, then the bytes."""

from typing import Any

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
END_TOKEN_IDS = [SPECIAL_TOKENS.index("<eos>"), SPECIAL_TOKENS.index("<end_of_turn>")]

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
    "eos_token_id": END_TOKEN_IDS,
    "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
}
"""What every config.json says of it."""
