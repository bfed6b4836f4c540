"""The page that `jaxkv plan --html` writes, opened in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxkv.cli import main
from tests.model_config.published import CONFIGS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Page(HTMLParser):
    """The cells of the tables, the JSON inside, and how many drawings there are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: dict[tuple[str, str], str] = {}
        self.json = ""
        self.drawings = 0
        self._in_report = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.drawings += tag == "svg" and found.get("role") == "img"
        self._in_report = tag == "script" and found.get("id") == "report"
        if tag == "td" and "data-key" in found:
            self.cells[found["data-plan"] or "", found["data-key"] or ""] = found["data-value"] or ""

    def handle_data(self, data: str) -> None:
        if self._in_report:
            self.json += data


def opened_in_a_browser(path: Path) -> str:
    """The document as the browser has it after loading."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.fail(
            f"no browser found (looked for {', '.join(BROWSERS)}): install Debian's, apt-get install chromium"
        )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command.append(f"--user-data-dir={path.parent / 'profile'}")
    return subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    page = tmp_path_factory.mktemp("page") / "plan.html"
    models = [str(CONFIGS / f"{name}.json") for name in ("lfm3-1.7b", "gemma-3-4b")]
    assert main(["plan", *models, "--memory", "8GiB", "--html", str(page)]) == 0
    return page, models


def test_the_numbers_in_the_browser_are_those_of_the_json(
    paths: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, models = paths
    capsys.readouterr()
    assert main(["plan", *models, "--memory", "8GiB", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    page = Page(opened_in_a_browser(path))
    assert json.loads(page.json) == reports
    # The last model's table stands last: its cells are the ones that remain.
    report = reports[-1]
    plans = {"split": report, **report["other_plans"]}
    compared = 0
    for (plan, key), shown in page.cells.items():
        if plan not in ("split", "unified", "hybrid manager off"):
            continue
        if key == "groups":
            wanted = len(plans[plan]["groups"])
        elif match := re.fullmatch(r"requests@(\d+)", key):
            lengths = {entry["num_tokens"]: entry for entry in plans[plan]["lengths"]}
            if int(match[1]) not in lengths:
                continue  # a length of the first model alone
            wanted = lengths[int(match[1])]["requests"]
        else:
            wanted = plans[plan][key]
        assert float(shown) == float(wanted), (plan, key)
        compared += 1
    assert compared >= 3 * 10
    assert page.drawings >= 2 * (2 * 2 + 1 + 2)


def test_the_page_loads_nothing(paths: tuple[Path, list[str]]) -> None:
    text = paths[0].read_text().split('<script type="application/json"')[0]
    assert not re.search(r"(src|href)=|url\((?!#)|@import|https?://", text)
