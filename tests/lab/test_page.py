"""The page of a replay: self-contained, with the report inside, and the same every time."""

import json
import re
from pathlib import Path

import pytest

from jaxkv.cli import main

MODEL = str(Path(__file__).parents[1] / "model_config" / "data" / "configs" / "gemma-3-1b.json")
MADE_UP = ["--generate", "chat", "--requests", "12", "--model", MODEL, "--max-model-len", "8192"]


def page(tmp_path: Path, *words: str) -> str:
    path = tmp_path / "page.html"
    assert main(["replay", *MADE_UP, *words, "--html", str(path)]) == 0
    return path.read_text(encoding="utf-8")


def test_a_page_loads_nothing_and_holds_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(tmp_path, "--memory", "256MiB", "--json", str(tmp_path / "report.json"))
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    report = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(found[1]) == [report]
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', text.replace("xlink:href", "href"))
    assert f"{100 * report['token_hit_rate']:.1f} %" in text
    assert text.count("<svg") == 2  # what became of the tokens, and the pool
    capsys.readouterr()


def test_a_sweep_draws_hit_rate_over_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--sweep", "memory=128MiB:256MiB,retention=sparse:dense", "--jobs")
    text = page(tmp_path, *words, "2")
    assert "Hit rate over memory" in text
    assert text.count("<svg") == 1 + 1 + 4
    # Digests included, whatever the number of processes.
    assert page(tmp_path, *words, "1") == text
    capsys.readouterr()
