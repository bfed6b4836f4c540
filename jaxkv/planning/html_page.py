"""A study as one self-contained page: drawings, tables, and the report as JSON inside it."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxkv.memory_size import format_bytes
from jaxkv.planning.drawings import (
    CAUSES,
    block_legend,
    kind_class,
    kind_label,
    length_drawing,
    nice_ceiling,
    pool_drawing,
    waste_drawing,
)
from jaxkv.planning.page_style import STYLE
from jaxkv.planning.plan import CachePlan
from jaxkv.planning.study import PlanStudy, study_report
from jaxkv.planning.table import layer_slots
from jaxkv.planning.waste import waste_of

DRAWN_LENGTHS = (8192, 131072)
"""Tokens up to which memory is drawn, or the maximum length where that is shorter."""

_LOST_EXACTLY = (
    "A bar is one request of exactly that length, and what it loses swings with how full its last block is."
)
_LOST_ON_AVERAGE = (
    "What is lost on average, at the top of this page, is the mean over the lengths around it, so that the "
    "last block is half full; neither counts states that are kept for later prompts."
)


def html_page(studies: Sequence[PlanStudy]) -> str:
    """The page for these studies. It loads nothing from anywhere."""
    reports = [study_report(study) for study in studies]
    # "</" would end the script element early.
    data = json.dumps(reports).replace("</", "<\\/")
    names = ", ".join(study.name for study in studies)
    body = "".join(_model(study, report) for study, report in zip(studies, reports, strict=True))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>jaxkv plan: {escape(names)}</title>"
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>{_patterns()}'
        f'{body}<script type="application/json" id="report">{data}</script></body></html>\n'
    )


def _patterns() -> str:
    return (
        '<svg width="0" height="0" aria-hidden="true"><defs><pattern id="hatch" width="6" height="6" '
        'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="hatch-back"/>'
        '<line x1="0" y1="0" x2="0" y2="6" class="hatch-line"/></pattern></defs></svg>'
    )


def _model(study: PlanStudy, report: dict[str, Any]) -> str:
    plans = {name: plan for name, plan in study.all_plans.items() if isinstance(plan, CachePlan)}
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in report["layers_by_kind"].items())
    if not study.plan.groups:
        return f"<main><h1>{escape(study.name)}</h1><p>No layer keeps a cache.</p></main>"
    lengths = [entry["num_tokens"] for entry in report["lengths"]]
    drawn = "".join(
        _length_figures(plans, study.plan, longest)
        for longest in sorted({min(study.plan.max_model_len, length) for length in DRAWN_LENGTHS})
    )
    notes = "".join(
        f"<li>{escape(note)}</li>" for note in (*study.warnings, *study.plan.notes, *_refusals(study))
    )
    pools = "".join(
        f"<h3>{escape(name)}: {layer_slots(plan.layer_slots)} of {format_bytes(plan.page_size_bytes)}</h3>"
        f'{pool_drawing(plan)}<p class="sr">{escape(block_legend(plan))}</p>'
        for name, plan in plans.items()
        if name in ("split", "unified")
    )
    return (
        f"<main><h1>{escape(study.name)}</h1><p class='lead'>{escape(kinds)}. "
        f"{escape(_machine(report))}</p>{_tiles(report)}"
        f"<h2>Memory of one request over its length</h2>{_legend(plans)}{drawn}"
        f"<h2>Where the bytes of one request go</h2><p>{escape(_LOST_EXACTLY)} {escape(_LOST_ON_AVERAGE)}</p>"
        f"{_cause_legend()}"
        f"{waste_drawing(plans, study.plan, lengths)}"
        f"<h2>The pool: groups and layer slots, to scale</h2><p>What lies under the block ids of each group, "
        f"each row as wide as its pages: colour is content, hatched is padding, outlined is empty.</p>{pools}"
        f"<h2>Side by side</h2>{_table(study)}"
        f"{f'<h2>Notes</h2><ul>{notes}</ul>' if notes else ''}</main>"
    )


def _length_figures(plans: dict[str, CachePlan], truth: CachePlan, longest: int) -> str:
    """A drawing for each plan, all on one scale, up to `longest` tokens or what the plan allows."""
    reach = {name: min(plan.max_model_len, longest) for name, plan in plans.items()}
    top = nice_ceiling(max(waste_of(plan, reach[name]).held_bytes for name, plan in plans.items()))
    figures = "".join(
        f"<figure><figcaption>{escape(name)}</figcaption>"
        f"{length_drawing(plan, truth, top, reach[name])}</figure>"
        for name, plan in plans.items()
    )
    return f"<div class='pair'>{figures}</div>"


def _refusals(study: PlanStudy) -> list[str]:
    return [f"{name}: {why}" for name, why in study.others.items() if isinstance(why, str)]


def _machine(report: dict[str, Any]) -> str:
    machine = report["machine"]
    cache = format_bytes(machine["cache_bytes_per_chip"])
    words = f"{machine['chips']} x {machine['accelerator']}, {cache} of cache"
    budget = machine["budget"]
    if budget is None:
        return words + " on each."
    chip, weights = format_bytes(budget["chip_bytes"]), format_bytes(budget["weight_bytes"])
    activations, free = format_bytes(budget["activation_bytes"]), format_bytes(budget["runtime_bytes"])
    return f"{words} on each: {chip} less {weights} weights, {activations} activations and {free} kept free."


def _tiles(report: dict[str, Any]) -> str:
    at_8k = next((e for e in report["lengths"] if e["num_tokens"] >= 8192), report["lengths"][-1])
    tiles = [
        (f"{at_8k['requests']:,.1f}", f"requests of {at_8k['num_tokens']:,} tokens at once"),
        (
            format_bytes(report["growing_bytes_per_token"]),
            "for one more token" + (", past the windows" if report["window_bytes"] else ""),
        ),
        (format_bytes(report["bytes_per_state"]) if report["bytes_per_state"] else "none", "recurrent state"),
        (f"{report['hit_alignment']:,}", "tokens: the shortest prefix that can hit"),
        (
            f"{100 * at_8k['mean_wasted_fraction']:.2f} %",
            f"lost at about {at_8k['num_tokens']:,} tokens, on average",
        ),
        (f"{len(report['groups'])}", "groups"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in tiles)
    return f"<div class='tiles'>{cells}</div>"


def _legend(plans: dict[str, CachePlan]) -> str:
    seen = {kind_label(g.spec): kind_class(g.spec) for plan in plans.values() for g in plan.groups}
    items = "".join(f"<li><i class='{css}'></i>{escape(label)}</li>" for label, css in seen.items())
    return f"<ul class='legend'>{items}<li><i class='need'></i>byte-exact, one state</li></ul>"


def _cause_legend() -> str:
    items = "".join(
        f"<li><i class='c-{key}'></i>{name}</li>" for key, name in {"needed": "needed", **CAUSES}.items()
    )
    return f"<ul class='legend'>{items}</ul>"


def _table(study: PlanStudy) -> str:
    """Every number also stands in a data-value attribute, as the JSON report has it."""
    reports = study.reports
    rows = [
        ("groups", "groups", lambda r: len(r["groups"]), str),
        ("page", "page_size_bytes", lambda r: r["page_size_bytes"], format_bytes),
        ("bytes of a block", "bytes_per_block", lambda r: r["bytes_per_block"], format_bytes),
        ("usable blocks", "usable_blocks", lambda r: r["usable_blocks"], _count),
        ("hits in steps of, tokens", "hit_alignment", lambda r: r["hit_alignment"], _count),
        ("longest request, tokens", "max_model_len", lambda r: r["max_model_len"], _count),
        ("capacity, tokens", "capacity_tokens", lambda r: r["capacity_tokens"], _count),
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in reports)
    body = "".join(
        f"<tr><th>{label}</th>"
        + "".join(_cell(name, key, get(r), show) for name, r in reports.items())
        + "</tr>"
        for label, key, get, show in rows
    )
    lengths = sorted({e["num_tokens"] for r in reports.values() for e in r["lengths"]})
    for length in lengths:
        cells = ""
        for name, report in reports.items():
            entry = next((e for e in report["lengths"] if e["num_tokens"] == length), None)
            cells += (
                "<td>-</td>"
                if entry is None
                else _cell(name, f"requests@{length}", entry["requests"], _requests)
            )
        body += f"<tr><th>requests of {length:,} tokens</th>{cells}</tr>"
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(plan: str, key: str, value: Any, show: Any) -> str:
    return f'<td data-plan="{escape(plan)}" data-key="{key}" data-value="{value}">{escape(show(value))}</td>'


def _count(value: int) -> str:
    return f"{value:,}"


def _requests(value: float) -> str:
    return f"{value:,.1f}"
