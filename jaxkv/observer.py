"""Who watches a cache decide: the laboratory does."""

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxkv.cache_request import CacheRequest
from jaxkv.hits import PrefixHit

if TYPE_CHECKING:
    from jaxkv.managers import Manager


class CacheObserver(Protocol):
    """Told of every decision. It changes nothing."""

    def admitted(self, request: CacheRequest, hit: PrefixHit) -> None:
        """The request has got its first blocks, beside those of its hit."""
        ...

    def evicting(self, manager: "Manager", leaders: NDArray[np.integer]) -> None:
        """These units of the manager are about to lose their content."""
        ...

    def freeing(self, request: CacheRequest, row: int) -> None:
        """The row, which is up to date, is about to give back its blocks."""
        ...
