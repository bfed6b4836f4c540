"""Dividing heads among chips."""

from jaxkv.errors import JaxkvError


def split_evenly(what: str, count: int, tensor_parallel: int) -> int:
    """`count` divided among the chips. Raises JaxkvError where it does not divide."""
    if count % tensor_parallel:
        raise JaxkvError(
            f"tensor_parallel {tensor_parallel} does not divide {what}: {count} heads or channels; choose "
            f"one of {', '.join(map(str, divisors(count)))}"
        )
    return count // tensor_parallel


def replicated_heads(num_heads: int, num_kv_heads: int, tensor_parallel: int) -> int:
    """KV heads (or groups of channels) on one chip: a share of them, or one that several chips replicate.

    Raises JaxkvError where the chips divide neither the heads nor the KV heads into equal parts.
    """
    if num_heads % tensor_parallel:
        raise JaxkvError(
            f"tensor_parallel {tensor_parallel} does not divide {num_heads} heads; choose one of "
            f"{', '.join(map(str, divisors(num_heads)))}"
        )
    if num_kv_heads % tensor_parallel == 0:
        return num_kv_heads // tensor_parallel
    if tensor_parallel % num_kv_heads == 0:
        return 1
    fitting = [n for n in divisors(num_heads) if num_kv_heads % n == 0 or n % num_kv_heads == 0]
    raise JaxkvError(
        f"tensor_parallel {tensor_parallel} neither divides {num_kv_heads} KV heads nor is a multiple of "
        "them, so they can neither be shared out nor be replicated evenly; choose one of "
        f"{', '.join(map(str, fitting))}"
    )


def divisors(number: int) -> list[int]:
    """All numbers that divide `number`, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0][:24]
