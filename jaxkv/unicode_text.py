"""Text that can be encoded, as hashes and tokenizers need it.

Python hands bytes of a command line that are no UTF-8 on as lone surrogates.
"""

from typing import Any

from jaxkv.errors import JaxkvError


def check_unicode(name: str, value: Any) -> None:
    """JaxkvError unless `value` is a string without lone surrogates; `name` is for the message."""
    if not isinstance(value, str):
        raise JaxkvError(f"{name} must be text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise JaxkvError(
            f"{name} {value!r} is not UTF-8 text: character {error.start} is {value[error.start]!r}"
        ) from None
