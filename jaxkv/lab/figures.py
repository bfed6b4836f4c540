"""The drawings of a report, as SVG elements to put into a page."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from jaxkv.memory_size import format_bytes

HIT = "#2f6fde"
NEVER = "#c9d0da"
REST = "#8b95a3"
LOSSES = ("#d64550", "#f0803c", "#f2c14e", "#b9a3e3", "#7a4b2a", "#8a5cd6")
LINES = ("#2f6fde", "#e08a1e", "#17a398", "#d64550", "#8a5cd6", "#7a4b2a", "#5d6877", "#c2185b")
INK = "#1c2430"
WIDTH = 9.2
"""Inches of a drawing; the page scales it."""

_STYLE: Any = {
    # Text stays text: smaller, and found by a search.
    "svg.fonttype": "none",
    # The same drawing has the same ids everywhere.
    "svg.hashsalt": "jaxkv",
    "font.family": "sans-serif",
    "font.sans-serif": ["Segoe UI", "Roboto", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#aab2bd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e7ed",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def label_of(report: dict[str, Any]) -> str:
    """How a replay is told from the others of its sweep."""
    return report["asked"].get("sweep") or report["model"]


def tokens_drawing(reports: Sequence[dict[str, Any]]) -> str:
    """What became of every prompt token: a bar for each replay."""
    names = ["hit"]
    for report in reports:
        names += [n for n in (_loss_name(loss) for loss in report["tokens"]["lost"]) if n not in names]
    names += ["end of a block, last token", "never computed before"]
    colours = [HIT, *(LOSSES[i % len(LOSSES)] for i in range(len(names) - 3)), REST, NEVER]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, 1.3 + 0.42 * len(reports)), layout="constrained")
        axes: Axes = figure.subplots()
        left = [0.0] * len(reports)
        for name, colour in zip(names, colours, strict=True):
            shares = [_share(report, name) for report in reports]
            bars = axes.barh(range(len(reports)), shares, left=left, color=colour, label=name, height=0.7)
            axes.bar_label(
                bars,
                [f"{100 * share:.0f} %" if share > 0.045 else "" for share in shares],
                label_type="center",
                color=INK if colour in (NEVER, "#f2c14e", "#b9a3e3") else "white",
                fontsize=9.5,
            )
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.set_yticks(range(len(reports)), [label_of(report) for report in reports])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("share of all prompt tokens")
        axes.grid(axis="y", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=9.5)
        return _svg(figure)


def memory_drawing(reports: Sequence[dict[str, Any]]) -> str:
    """Hit rate over memory: a line for each other setting of the sweep."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for report in reports:
        lines.setdefault(line_of(report), []).append((report["plan"]["bytes"], report["token_hit_rate"]))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes: Axes = figure.subplots()
        for number, (name, points) in enumerate(lines.items()):
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, marker="o", color=LINES[number % len(LINES)], label=name, linewidth=2)
        best = max(1 - r["tokens"]["never_computed"] / max(1, r["prompt_tokens"]) for r in reports)
        axes.axhline(best, color=REST, linestyle="--", linewidth=1)
        axes.annotate(
            "with endless memory, to the token",
            (0, best),
            (4, 4),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color="#5d6877",
            fontsize=9.5,
        )
        axes.set_xscale("log", base=2)
        sizes = sorted({report["plan"]["bytes"] for report in reports})
        axes.set_xticks(sizes, [format_bytes(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(0, min(1.05, 1.25 * max(best, 0.04)))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylabel("prompt tokens that hit")
        axes.set_xlabel("memory of the cache")
        if len(lines) > 1:
            axes.legend(loc="lower right")
        return _svg(figure)


def pool_drawing(report: dict[str, Any]) -> str:
    """How the pool was used over the replay."""
    samples = report["pool"]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        axes: Axes = figure.subplots()
        ended = [sample["ended"] for sample in samples]
        held = [sample["held"] for sample in samples]
        cached = [sample["cached"] for sample in samples]
        axes.stackplot(
            ended,
            held,
            cached,
            labels=["held by running requests", "kept for later hits"],
            colors=[LINES[1], HIT],
        )
        axes.set_xlim(ended[0], ended[-1])
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.set_ylabel("share of the pool")
        axes.set_xlabel("requests answered")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2, fontsize=9.5)
        return _svg(figure)


def line_of(report: dict[str, Any]) -> str:
    """The sweep's settings without those that are a memory."""
    parts = (report["asked"].get("sweep") or "").split(", ")
    kept = [part for part in parts if part.split(" ")[0] not in ("memory", "fits", "blocks", "")]
    return ", ".join(kept) or "token hit rate"


def _loss_name(loss: dict[str, Any]) -> str:
    return f"{loss['cause']}: {loss['layers']}"


def _share(report: dict[str, Any], name: str) -> float:
    tokens = report["tokens"]
    fixed = {
        "hit": tokens["hit"],
        "end of a block, last token": tokens["granularity"],
        "never computed before": tokens["never_computed"],
    }
    lost = sum(loss["tokens"] for loss in tokens["lost"] if _loss_name(loss) == name)
    return fixed.get(name, lost) / max(1, report["prompt_tokens"])


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
