"""What an engine may ask of any language model here."""

import jax
from flax import nnx

from models.paged_cache import PagedCache


def layer_name(index: int) -> str:
    """The name under which layer `index` keeps its pages."""
    return f"layers.{index}"


class CausalLM(nnx.Module):
    """A model that predicts the next token, with its weights."""

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: PagedCache
    ) -> tuple[jax.Array, PagedCache]:
        """Runs tokens int32[T] at positions int32[T] of their sequences: hidden states [T, D], and the new
        cache."""
        raise NotImplementedError

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the next token, float32[N, V], for hidden states [N, D]."""
        raise NotImplementedError
