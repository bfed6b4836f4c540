"""How much work a token is: what a hit saves."""

from typing import NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.model_config.layer_caches import AttentionCache, LatentCache
from jaxkv.model_config.mlp_parameters import idle_parameters
from jaxkv.model_config.model_cache import ModelCache
from jaxkv.model_config.parameters import count_parameters


class _Reads(NamedTuple):
    """FLOPs of a token for each earlier token it reads, and how many it reads at most (None: all)."""

    flops: int
    reach: int | None


class ModelCost:
    """FLOPs of reading tokens: two for each parameter that a token passes, and those of attention.

    Input and output embeddings do no work while a prompt is read. The updates of recurrent states, a few
    operations for each of their elements, are left out.
    """

    def __init__(self, flops_per_token: int, reads: tuple[_Reads, ...]) -> None:
        self._flops_per_token = flops_per_token
        self._reads = reads

    def of_tokens(self, start: int, stop: int) -> int:
        """FLOPs of tokens [start, stop) of a prompt whose tokens before `start` are there."""
        total = (stop - start) * self._flops_per_token
        for reads in self._reads:
            total += reads.flops * (_tokens_read(stop, reads.reach) - _tokens_read(start, reads.reach))
        return total


def _tokens_read(length: int, reach: int | None) -> int:
    """Tokens that the first `length` tokens read together, themselves included."""
    grows = length if reach is None else min(length, reach)
    return grows * (grows + 1) // 2 + (length - grows) * grows


def model_cost(model: ModelCache) -> ModelCost | None:
    """The cost of a model's tokens; None where its configuration lacks a size."""
    if model.text is None:
        return None
    try:
        passed = count_parameters(model).layers - idle_parameters(model.text, len(model.layers))
        latent_heads = model.text.optional_integer("num_attention_heads") or 0
    except JaxkvError:
        return None
    counts: dict[_Reads, int] = {}
    for cache in model.caches.values():
        if isinstance(cache, AttentionCache):
            reads = _Reads(2 * cache.num_heads * (cache.head_size + cache.head_size_v), cache.reach)
        elif isinstance(cache, LatentCache):
            reads = _Reads(4 * latent_heads * cache.width, None)
        else:
            continue
        counts[reads] = counts.get(reads, 0) + 1
    merged = tuple(_Reads(reads.flops * count, reads.reach) for reads, count in counts.items())
    return ModelCost(2 * passed, merged)
