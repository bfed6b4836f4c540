"""Reading a JSON file that must hold an object."""

import json
from pathlib import Path
from typing import Any

from jaxkv.errors import JaxkvError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. JaxkvError where the file is missing, is not JSON, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JaxkvError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise JaxkvError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise JaxkvError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
