"""The files of tests/golden (made by scripts/make_golden.py) and how logits are compared with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER = Path(__file__).parent.parent / "golden"


class Answer(NamedTuple):
    """One prompt and what transformers made of it.

    tokens: the prompt and the greedy answer. num_prompt: how many of them are the prompt.
    positions: whose next-token logits are known; of each, the largest (top_ids, top_logits), every stride-th
    (some_logits), and the log of the sum of all exponentials (log_sum).
    """

    tokens: list[int]
    num_prompt: int
    positions: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray
    some_logits: np.ndarray
    log_sum: np.ndarray
    stride: int

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.num_prompt]

    def known(self, start: int, end: int) -> list[int]:
        """The positions in [start, end) whose logits are known."""
        return [int(position) for position in self.positions if start <= position < end]

    def largest_error(self, positions: Sequence[int], logits: np.ndarray) -> float:
        """The largest difference of logits[len(positions), V] at known positions, over all that is known."""
        worst = 0.0
        for row, position in zip(logits, positions, strict=True):
            at = int(np.flatnonzero(self.positions == position)[0])
            errors = (
                row[self.top_ids[at]] - self.top_logits[at],
                row[:: self.stride] - self.some_logits[at],
                np.atleast_1d(np.logaddexp.reduce(row.astype(np.float64)) - self.log_sum[at]),
            )
            worst = max(worst, *(float(np.max(np.abs(error))) for error in errors))
        return worst


def answers(name: str) -> list[Answer]:
    """All prompts of one file."""
    with np.load(FOLDER / name) as file:
        return [
            Answer(
                tokens=file[f"tokens_{i}"].tolist(),
                num_prompt=int(file[f"num_prompt_{i}"]),
                positions=file[f"positions_{i}"],
                top_ids=file[f"top_ids_{i}"],
                top_logits=file[f"top_logits_{i}"],
                some_logits=file[f"some_logits_{i}"],
                log_sum=file[f"log_sum_{i}"],
                stride=int(file["stride"]),
            )
            for i in range(int(file["num_prompts"]))
        ]
