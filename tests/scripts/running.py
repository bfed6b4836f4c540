"""Scripts run as a user runs them, where no accelerator is used."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python scripts/NAME ARGUMENTS` on the CPU, with what it prints."""
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
