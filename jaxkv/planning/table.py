"""A plan as text for a terminal."""

import re
from collections.abc import Sequence
from typing import Any

from jaxkv.memory_size import format_bytes
from jaxkv.planning.plan import CachePlan
from jaxkv.planning.report import plan_report

_CAUSES = {
    "padding_layers": "empty layer slots",
    "page_padding": "page padding",
    "block_tail": "ends of blocks",
    "reserved_states": "reserved states",
}


def format_plan(plan: CachePlan, title: str, report: dict[str, Any] | None = None) -> str:
    """The plan under `title`: groups, pool, what fits, where the bytes go, and the notes.

    report: the plan's, where it is at hand.
    """
    report = report or plan_report(plan)
    if not plan.groups:
        return f"{title}\n\n  no layer keeps a cache"
    sections = [title, _groups(report), _pool(report), _waste(report)]
    if report["notes"]:
        sections.append("\n".join(f"  note: {note}" for note in report["notes"]))
    return "\n\n".join(sections)


def _groups(report: dict[str, Any]) -> str:
    rows = [("group", "kind", "layers", "empty", "block", "page", "blocks a request", "which layers")]
    for index, group in enumerate(report["groups"]):
        kind = group["kind"] + (f" {group['reach']}" if group["reach"] else "")
        states = f" x {group['blocks_per_state']}" if group["blocks_per_state"] > 1 else ""
        rows.append(
            (
                str(index),
                kind,
                str(len(group["layer_names"])),
                str(group["empty_slots"]),
                f"{group['block_size']} tokens",
                format_bytes(report["page_size_bytes"]) + states,
                str(group["blocks_per_request"]),
                short_names(group["layer_names"]),
            )
        )
    return columns(rows)


def _pool(report: dict[str, Any]) -> str:
    block = f"{layer_slots(report['layer_slots'])} x {format_bytes(report['page_size_bytes'])}"
    per_request = sum(report["blocks_per_request"])
    steady = sum(report["steady_blocks_per_request"])
    length = f"{report['max_model_len']:,} tokens"
    rows = [
        ("block", f"{block} = {format_bytes(report['bytes_per_block'])}"),
        (
            "pool",
            f"{report['usable_blocks']:,} usable blocks + the null block = {_bytes(report, 'pool_bytes')}",
        ),
        (
            "longest request",
            f"{length}, {per_request:,} blocks with {report['max_in_flight_tokens']:,} in flight",
        ),
        ("at once, guaranteed", f"{report['concurrency']:.2f} requests of {length}"),
        (
            "at once, decoding",
            f"{report['steady_concurrency']:.2f} requests of {length}, {steady:,} blocks each",
        ),
        (
            f"{report['max_num_seqs']} requests",
            f"up to {report['tokens_each_at_max_num_seqs']:,} tokens each",
        ),
        ("capacity", f"{report['capacity_tokens']:,} tokens"),
        ("prefix hits", f"from {report['hit_alignment']} tokens on, in steps of {report['hit_alignment']}"),
    ]
    return columns(rows)


def _waste(report: dict[str, Any]) -> str:
    rows = [("one request of", "holds", "needs", *_CAUSES.values(), "wasted")]
    rows += [
        (
            f"{waste['num_tokens']:,} tokens",
            _bytes(waste, "held_bytes"),
            _bytes(waste, "needed_bytes"),
            *(_bytes(waste, cause) for cause in _CAUSES),
            f"{100 * waste['wasted_fraction']:.2f} %",
        )
        for waste in report["waste"]
    ]
    return columns(rows)


def layer_slots(count: int) -> str:
    """ "1 layer slot", "2 layer slots"."""
    return f"{count} layer slot" + "s" * (count != 1)


def short_names(names: Sequence[str]) -> str:
    """ "layers.0, 6, 12" for names that differ in one number only; at most eight are written out."""
    parts = [re.fullmatch(r"(\D*)(\d+)", name) for name in names]
    prefixes = {part[1] for part in parts if part}
    shown: list[str] = list(names)
    if names and all(parts) and len(prefixes) == 1:
        numbers = [part[2] for part in parts if part]
        shown = [prefixes.pop() + numbers[0], *numbers[1:]]
    if len(shown) > 8:
        shown = [*shown[:6], "...", shown[-1]]
    return ", ".join(shown)


def _bytes(values: dict[str, Any], key: str) -> str:
    return format_bytes(values[key])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as left-aligned columns, indented by two spaces."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    )
