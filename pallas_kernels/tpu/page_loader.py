"""What loaders of operands have in common: how wide and how many the rows are that they make of a page."""

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import AttentionPageLayout
from pallas_kernels.tpu.places import Places


@dataclass(frozen=True)
class PageLoader:
    """Loads operands of `layout`'s pages for products in `dtype` (bfloat16 or float32).

    A unit is a token of a head, or the tokens that share a row of 128 words; an operand has a row for each.
    """

    layout: AttentionPageLayout
    dtype: jnp.dtype

    @cached_property
    def places(self) -> Places:
        """The places of a unit's tokens in its row."""
        raise NotImplementedError

    @property
    def key_width(self) -> int:
        """Lanes of one head of K; those from `head_size` on have no meaning."""
        return self.places.width

    @property
    def page_units(self) -> int:
        """Units of one page."""
        return self.layout.block_size // self.places.count

    @property
    def operand_dtype(self) -> jnp.dtype:
        """Of K and V in products."""
        return self.dtype

    @property
    def precision(self) -> lax.Precision | None:
        """Precision of the products."""
        return None if self.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
