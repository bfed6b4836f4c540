"""Files that a command writes because an option asks for them."""

import os
from pathlib import Path

from jaxkv.errors import JaxkvError


def refuse_unwritable(option: str, path: str | None) -> None:
    """Raises JaxkvError for a file that surely cannot be written; for commands that work long before."""
    if path is None:
        return
    file = Path(path)
    if file.is_dir():
        reason = "it is a folder"
    elif not file.parent.is_dir():
        reason = f"there is no folder {file.parent}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise JaxkvError(f"cannot write {option} {path}: {reason}")


def write_file(option: str, path: str, text: str) -> None:
    """Raises JaxkvError where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise JaxkvError(f"cannot write {option} {path}: {error.strerror}") from None
