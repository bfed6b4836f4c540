"""What the cache reads of a request. It never writes to one."""

from typing import Protocol

from jaxkv.errors import JaxkvError
from jaxkv.hashing import BlockHasher, Hashable


class CacheRequest(Hashable, Protocol):
    """A request as the cache sees it: names, counts and hashes. `jaxkv.request.Request` is one."""

    request_id: str
    num_prompt_tokens: int
    num_preemptions: int

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose content exists once all scheduled steps have run."""
        ...

    def block_hashes(self, hasher: BlockHasher) -> list[bytes]:
        """The hash of every hash block that the known tokens fill."""
        ...


def check_request(request: CacheRequest) -> None:
    """JaxkvError for what is no request at all."""
    if not hasattr(request, "block_hashes"):
        raise JaxkvError(f"request must be a Request, not {request!r}")
