"""A progress bar on standard error that needs no library."""

import sys
import time

_WIDTH = 30
_EVERY = 0.1
"""Seconds between two drawings."""


class ProgressBar:
    """Draws itself over one line; where standard error is no terminal, does nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._show = sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._show or (now - self._last < _EVERY and done < total):
            return
        self._last, self._drawn = now, True
        filled = _WIDTH * done // max(1, total)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        rate = done / max(1e-9, now - self._start)
        left = (total - done) / rate if done else 0.0
        print(
            f"\r{self._what} [{bar}] {done:,}/{total:,}, {left:.0f} s left ",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Leaves the line."""
        if self._drawn:
            print(file=sys.stderr)
