import sys
from pathlib import Path

import pytest

from tests.engine.serving import load_script


def test_where_the_other_side_dies_its_last_words_are_shown(tmp_path, monkeypatch):
    bench = load_script("bench_engine")
    peer = tmp_path / "slow_peer.py"
    peer.write_text("import sys\nfor i in range(100): print('line', i, file=sys.stderr)\nsys.exit(3)\n")
    monkeypatch.setattr(bench, "PEERS", tmp_path)
    monkeypatch.setattr(bench, "gemma3_270m", lambda: Path("weights.gguf"))
    with pytest.raises(SystemExit) as end:
        bench.Peer("slow", sys.executable, "float32")
    assert "slow process ended with code 3" in str(end.value)
    assert str(end.value).splitlines()[1:] == [f"line {i}" for i in range(80, 100)]
