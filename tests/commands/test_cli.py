"""What ends a command early, whichever command it is."""

import importlib
from typing import Any

import pytest

from jaxkv.cli import main


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "jaxkv: interrupted\n"),
        (MemoryError("8 TiB"), 2, "jaxkv: error: not enough memory on this machine: 8 TiB\n"),
    ],
)
def test_what_ends_a_command_while_it_is_still_being_imported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ending: BaseException,
    code: int,
    message: str,
) -> None:
    def end(name: str) -> Any:
        raise ending

    monkeypatch.setattr(importlib, "import_module", end)
    assert main(["plan", "gemma3-270m"]) == code
    assert capsys.readouterr().err == message
