"""What `jaxkv generate` takes as prompts, before any engine is loaded."""

from pathlib import Path

import pytest

from jaxkv.cli import main
from jaxkv.commands.generate import read_prompts


def test_only_line_ends_divide_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\x0cpage\r\n\ntwo\u2028lines\x85and more".encode())
    assert read_prompts(["first"], str(path)) == ["first", "one\x0cpage", "two\u2028lines\x85and more"]


@pytest.mark.parametrize("option", ["--prompt", "--stop"])
def test_bytes_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str], option: str) -> None:
    text = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python hands on a Latin-1 command line
    assert main(["generate", "--model", "no-such-model", "--prompt", "x", option, text]) == 2
    assert "is not UTF-8 text: character 3 is '\\udce9'" in capsys.readouterr().err
