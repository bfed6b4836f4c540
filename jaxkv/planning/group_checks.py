"""Groups that no cache can serve, whatever its options."""

from collections.abc import Sequence

from jaxkv.errors import JaxkvError
from jaxkv.planning.plan import CacheGroup
from jaxkv.specs import ChunkedLocalAttentionSpec, MambaSpec, ScratchSpec, SlidingWindowSpec


def check_groups(groups: Sequence[CacheGroup], context_parallel_size: int) -> None:
    """Raises JaxkvError, with the values, for groups that cannot be right."""
    for index, group in enumerate(groups):
        spec = group.spec
        if group.is_eagle_group and isinstance(spec, MambaSpec):
            raise JaxkvError(
                f"group {index} is an EAGLE group of recurrent layers: a recurrent state cannot give up "
                "its last block, draft models must not have such layers"
            )
        if context_parallel_size == 1:
            continue
        if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec | ScratchSpec) and spec.dcp_sharded:
            raise JaxkvError(
                f"decode_context_parallel_size {context_parallel_size}: group {index} of kind {spec.kind!r} "
                "cannot be spread over ranks; only full attention can, recurrent and replicated "
                "(dcp_sharded=False) groups are copied"
            )
