"""What most language models have around their layers."""

import jax
import jax.numpy as jnp

from models.causal_lm import CausalLM
from models.linear import VocabularyMatrix, look_up, vocabulary_logits
from models.norms import RMSNorm


class HeadedLM(CausalLM):
    """An embedding, a norm after the last layer, and an output matrix: the embedding where `tied`."""

    def __init__(self, vocab_size: int, hidden_size: int, eps: float, dtype: jnp.dtype, *, tied: bool):
        self.embedding = VocabularyMatrix(jnp.zeros((vocab_size, hidden_size), dtype))
        self.head = None if tied else VocabularyMatrix(jnp.zeros((vocab_size, hidden_size), dtype))
        self.norm = RMSNorm(hidden_size, eps)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[T, hidden_size] for tokens int32[T]."""
        return look_up(self.embedding[...], tokens)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return vocabulary_logits(hidden, (self.embedding if self.head is None else self.head)[...])
