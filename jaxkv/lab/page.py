"""Replays as one self-contained page: drawings, what they mean, and the reports as JSON inside it."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxkv.lab.figures import label_of, memory_drawing, pool_drawing, tokens_drawing
from jaxkv.memory_size import format_bytes

MOST_POOLS = 4
"""Drawings of pool use on one page."""

_STYLE = """\
* { box-sizing: border-box; }
body { margin: 0; color: #1c2430; background: #fff;
  font: 15px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 940px; margin: 0 auto; padding: 36px 24px 60px; }
h1 { margin: 0 0 4px; font-size: 29px; letter-spacing: -0.02em; }
h2 { margin: 38px 0 6px; font-size: 19px; }
h3 { margin: 18px 0 0; font-size: 14px; font-weight: 600; }
p { margin: 0 0 12px; max-width: 74ch; }
.soft, dd { color: #5d6877; }
.warn { background: #fdf0d5; border-radius: 8px; padding: 10px 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(135px, 1fr)); gap: 10px;
  margin: 18px 0; }
.tiles div { background: #f4f6f9; border-radius: 10px; padding: 12px 14px; }
.tiles b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tiles span { color: #5d6877; font-size: 12.5px; }
svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { text-align: right; padding: 6px 0 6px 14px; border-bottom: 1px solid #d9dee6; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { font-weight: 600; vertical-align: bottom; }
dt { font-weight: 600; }
dd { margin: 0 0 8px; max-width: 74ch; }
"""

_GLOSSARY = {
    "hit": "the token's keys and values, or the state after it, were still in memory: nothing was computed.",
    "evicted": "an earlier request had computed it, and it was thrown out to make room.",
    "not kept": "an earlier request had computed the text, but this kind of layer had kept nothing at that "
    "place that one could go on from: windows and recurrent states are kept at chosen places only.",
    "end of a block, last token": "hits are whole blocks, and the last token of a prompt is always computed.",
    "never computed before": "new text. No cache can help.",
}


def report_page(reports: Sequence[dict[str, Any]]) -> str:
    """The page for replays of one trace. It loads nothing from anywhere."""
    first, trace = reports[0], reports[0]["trace"]
    # "</" would end the script element early.
    data = json.dumps(list(reports)).replace("</", "<\\/")
    models = ", ".join(dict.fromkeys(report["model"] for report in reports))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>jaxkv replay: {escape(models)}</title>"
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main>'
        f"<h1>{escape(models)}: how often prompts hit</h1>"
        f"<p class='soft'>{escape(trace['source'])}: {first['requests']['in_trace']:,} requests with "
        f"{trace['prompt_tokens']:,} prompt tokens, replayed through jaxkv's scheduler and cache without the "
        f"model. {_CLOCKS[first['settings']['clock']]}</p>"
        "<p>A model reads a prompt before it answers. Where a prompt begins like an earlier one, what was "
        "computed for the common beginning can be used again, if it is still in memory: those tokens "
        "<b>hit</b> and cost nothing. This page shows how many did, and why the others did not.</p>"
        f"{_warnings(reports)}{_tiles(reports)}{_memory(reports)}"
        "<h2>What became of every prompt token</h2>"
        f"<p>Each bar is all prompt tokens of a replay. Blue was free; grey never had a chance. The colours "
        f"between are what a larger memory or another policy could win.</p>{tokens_drawing(reports)}"
        f"{_glossary()}{_pools(reports)}<h2>Figures</h2>{_table(reports)}{_notes(trace)}"
        f'</main><script type="application/json" id="report">{data}</script></body></html>\n'
    )


_CLOCKS = {
    "sequential": "Each request came when the one before it had been answered.",
    "trace": "Requests came at the trace's own times.",
    "as-fast-as-possible": "All requests waited from the beginning and were served in order.",
}


def _warnings(reports: Sequence[dict[str, Any]]) -> str:
    lines = []
    if any(report["partial"] for report in reports):
        lines.append("Interrupted: the figures are of the requests answered until then.")
    if not reports[0]["trace"]["has_content"]:
        lines.append("This trace tells lengths only: its hit rate means nothing.")
    refused = max(report["requests"]["refused"] for report in reports)
    if refused:
        lines.append(
            f"Up to {refused:,} requests were too long for the model or the memory and are left out."
        )
    return "".join(f"<p class='warn'>{escape(line)}</p>" for line in lines)


def _tiles(reports: Sequence[dict[str, Any]]) -> str:
    best = max(reports, key=lambda report: report["token_hit_rate"])
    total = max(1, best["prompt_tokens"])
    tiles = [
        (f"{100 * best['token_hit_rate']:.1f} %", "of prompt tokens hit"),
        (f"{100 * (1 - best['tokens']['never_computed'] / total):.1f} %", "had been computed before"),
        (format_bytes(best["plan"]["bytes"]), "of cache"),
        (f"{best['plan']['requests_of_maximum_length']:.3g}", "longest requests fit into it"),
        (f"{best['recomputed_tokens']:,}", "tokens computed again"),
    ]
    if best["saved_flops"]:
        tiles.append((f"{best['saved_flops']:.2g}", "FLOPs that hits saved"))
    title = f"<h3>The best of {len(reports)}: {escape(label_of(best))}</h3>" if len(reports) > 1 else ""
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in tiles)
    return f"{title}<div class='tiles'>{cells}</div>"


def _memory(reports: Sequence[dict[str, Any]]) -> str:
    if len({report["plan"]["bytes"] for report in reports}) < 2:
        return ""
    return (
        "<h2>Hit rate over memory</h2><p>More memory keeps more for later. Where a line gets flat, more of "
        f"it is wasted.</p>{memory_drawing(reports)}"
    )


def _glossary() -> str:
    return (
        "<dl>" + "".join(f"<dt>{escape(w)}</dt><dd>{escape(m)}</dd>" for w, m in _GLOSSARY.items()) + "</dl>"
    )


def _pools(reports: Sequence[dict[str, Any]]) -> str:
    drawn = [report for report in reports if len(report["pool"]) > 1][:MOST_POOLS]
    if not drawn:
        return ""
    figures = "".join(f"<h3>{escape(label_of(report))}</h3>{pool_drawing(report)}" for report in drawn)
    return (
        "<h2>Use of the pool over time</h2><p>Orange is in use by requests that are being answered; blue is "
        f"kept in the hope of hits and given up when room is needed; white is unused.</p>{figures}"
    )


def _table(reports: Sequence[dict[str, Any]]) -> str:
    heads = (
        "replay", "memory", "token hits", "block hits", "computed again", "running, mean", "preemptions",
        "states kept",
    )  # fmt: skip
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                label_of(report),
                format_bytes(report["plan"]["bytes"]),
                f"{100 * report['token_hit_rate']:.2f} %",
                f"{100 * report['block_hit_rate']:.2f} %",
                f"{report['recomputed_tokens']:,}",
                f"{report['concurrency']['mean']:.1f}",
                f"{report['preemptions']:,}",
                f"{report['states_kept']:,}",
            )
        )
        + "</tr>"
        for report in reports
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _notes(trace: dict[str, Any]) -> str:
    if not trace["notes"]:
        return ""
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(n)}</li>" for n in trace["notes"]) + "</ul>"
