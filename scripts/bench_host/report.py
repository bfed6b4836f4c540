"""Figures of a run, as rows with the ratio of the two sides and the aim beside it."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .layouts import LAYOUTS

AIMS = {
    "look-up 32k": 5.0,
    "look-up 128k": 5.0,
    "chunk of 2,048": 4.0,
    "free 32k": 4.0,
    "decode step of 256, manager": 10.0,
    "decode step of 256, scheduler": 8.0,
    "hashing 32k": 2.0,
}
"""vLLM's time over ours must be at least this."""

MORE_GROUPS_AIM = 1.5
"""A decode step of the layout with 31 groups over one of the layout with 7: at most this."""

_TITLES = {layout.name: layout.title for layout in LAYOUTS}


@dataclass(frozen=True)
class Row:
    """One figure on one layout: the shortest time of all rounds, in microseconds, which other load on the
    machine disturbs least. `ratio`: vLLM's over ours; `median_ratio`: the median over rounds of the ratio
    within a round, in which the two sides run one after the other. None without vLLM."""

    figure: str
    layout: str
    jaxkv_us: float
    vllm_us: float | None = None
    ratio: float | None = None
    median_ratio: float | None = None

    @property
    def aim(self) -> float | None:
        return AIMS.get(self.figure)

    @property
    def met(self) -> bool | None:
        return None if self.aim is None or self.ratio is None else self.ratio >= self.aim


def make_row(figure: str, layout: str, jaxkv: list[float], vllm: list[float] | None) -> Row:
    """`jaxkv`, `vllm`: seconds by round."""
    ours = min(jaxkv)
    if vllm is None:
        return Row(figure, layout, 1e6 * ours)
    theirs = min(vllm)
    median = statistics.median(b / a for a, b in zip(jaxkv, vllm, strict=True))
    return Row(figure, layout, 1e6 * ours, 1e6 * theirs, theirs / ours, median)


def more_groups(rows: Iterable[Row]) -> dict[str, float]:
    """By decode figure: our time with 31 groups over our time with 7, where both were measured."""
    ours = {(row.figure, row.layout): row.jaxkv_us for row in rows}
    return {
        figure: ours[figure, "gemma3_31"] / ours[figure, "gemma3"]
        for figure, layout in ours
        if layout == "gemma3_31" and figure.startswith("decode") and (figure, "gemma3") in ours
    }


def as_json(rows: list[Row], environment: dict[str, object]) -> dict[str, object]:
    return {
        "environment": environment,
        "rows": [{**vars(row), "aim": row.aim, "met": row.met} for row in rows],
        "31_groups_over_7": {
            figure: {"ratio": ratio, "aim": MORE_GROUPS_AIM, "met": ratio <= MORE_GROUPS_AIM}
            for figure, ratio in more_groups(rows).items()
        },
    }


def as_markdown(rows: list[Row]) -> str:
    """A table for each layout, then the cost of more groups."""
    lines: list[str] = []
    for layout in dict.fromkeys(row.layout for row in rows):
        lines += [
            f"### {_TITLES[layout]}",
            "",
            "| case | jaxkv (us) | vLLM (us) | ratio | median ratio | aim |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row.layout != layout:
                continue
            theirs = "" if row.vllm_us is None else f"{row.vllm_us:,.1f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.1f}"
            median = "" if row.median_ratio is None else f"{row.median_ratio:.1f}"
            aim = "" if row.aim is None else f">= {row.aim:g}"
            aim += ", missed" if row.met is False else ""
            lines.append(f"| {row.figure} | {row.jaxkv_us:,.1f} | {theirs} | {ratio} | {median} | {aim} |")
        lines.append("")
    for figure, ratio in more_groups(rows).items():
        missed = "" if ratio <= MORE_GROUPS_AIM else ", missed"
        lines.append(
            f"{figure}: 31 groups take {ratio:.2f} times as long as 7 (aim <= {MORE_GROUPS_AIM}{missed})"
        )
    return "\n".join(lines)
