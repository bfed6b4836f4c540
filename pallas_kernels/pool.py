"""The pool of pages that all operations take."""

import jax

from pallas_kernels.layout import LANES


def check_pool(pages: jax.Array, page_rows: int) -> None:
    """ValueError for what is no pool of pages of `page_rows` rows."""
    if pages.ndim != 3 or pages.shape[1:] != (page_rows, LANES) or pages.dtype != "uint32":
        raise ValueError(
            f"pages must be uint32[num_pages, {page_rows}, {LANES}], got {pages.dtype}{list(pages.shape)}"
        )
