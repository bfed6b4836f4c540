"""The script that tunes sizes: what it keeps of the table."""

import json
from pathlib import Path

import pytest

from tests.engine.serving import load_script

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_rows_of_shapes_looked_at_are_replaced_or_dropped_and_others_kept(tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)  # scripts import one another by name
        script = load_script("tune_kernels")
    table = tmp_path / "tuned.json"
    table.write_text(
        json.dumps([{"shape": {"group": g}, "sizes": "old"} for g in (1, 2, 3)]), encoding="utf-8"
    )
    monkeypatch.setattr(script, "TABLE", table)
    script.write([{"shape": {"group": 2}, "sizes": "new"}], [{"group": 1}, {"group": 2}])
    assert json.loads(table.read_text(encoding="utf-8")) == [
        {"shape": {"group": 3}, "sizes": "old"},
        {"shape": {"group": 2}, "sizes": "new"},
    ]
