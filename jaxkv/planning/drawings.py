"""Drawings of plans as inline SVG: the pool, memory over sequence length, waste by cause."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from jaxkv.memory_size import format_bytes
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.planning.report import reach_of
from jaxkv.planning.table import short_names
from jaxkv.planning.waste import waste_by_group, waste_of
from jaxkv.specs import KVCacheSpec

KIND_CLASSES = {
    "full": "k-full",
    "mla": "k-full",
    "sliding_window": "k-window",
    "sliding_window_mla": "k-window",
    "chunked_local": "k-chunk",
    "mamba": "k-state",
}
"""CSS class of the colour of each kind; others share one."""

CAUSES = {
    "padding_layers": "empty layer slots",
    "page_padding": "page padding",
    "block_tail": "ends of blocks",
    "out_of_reach": "out of reach",
    "reserved_states": "reserved states",
}
WIDTH = 860

WIDEST_BAR = 2.0
"""Times what a request needs."""


def kind_class(spec: KVCacheSpec) -> str:
    """The CSS class of the spec's colour."""
    return KIND_CLASSES.get(spec.kind, "k-other")


def kind_label(spec: KVCacheSpec) -> str:
    """The kind, with its window or chunk."""
    return f"{spec.kind.replace('_', ' ')} {reach_of(spec) or ''}".strip()


class Rect(NamedTuple):
    """A rectangle with a tooltip."""

    x: float
    y: float
    width: float
    height: float
    css: str
    title: str

    def svg(self) -> str:
        return (
            f'<rect x="{self.x:.2f}" y="{self.y:.2f}" width="{max(self.width, 0):.2f}" '
            f'height="{max(self.height, 0):.2f}" class="{self.css}">'
            f"<title>{escape(self.title)}</title></rect>"
        )


def _text(x: float, y: float, content: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(content)}</text>'


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def alike(plan: CachePlan) -> list[range]:
    """Runs of groups that look the same: one spec, as many layers, as many blocks a state."""
    runs: list[range] = []
    for index, group in enumerate(plan.groups):
        key = (group.spec, len(group.layer_names), group.blocks_per_state)
        first = plan.groups[runs[-1].start] if runs else None
        if first is not None and key == (first.spec, len(first.layer_names), first.blocks_per_state):
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def pool_drawing(plan: CachePlan) -> str:
    """One row for all groups that look alike: what lies under the block ids that go together, page by page.

    The coloured part of a page is content, to scale, the hatched part padding; empty slots are outlined. A
    group whose states are spread over many blocks is drawn as one strip of them all.
    """
    left, right, row, gap = 210, 190, 26, 8
    area = WIDTH - left - right
    parts: list[str] = []
    y = 6.0
    for run in alike(plan):
        group = plan.groups[run.start]
        pages = plan.layer_slots * group.blocks_per_state
        unit = area / pages
        numbers = f"{run.start}" if len(run) == 1 else f"{run.start} to {run.stop - 1}"
        parts.append(_text(0, y + 17, f"{numbers}: {kind_label(group.spec)}", "label"))
        used = 0
        for position, name in enumerate(group.layer_names):
            place = plan.layer_location(name)
            spec = group.spec_of(position)
            share = spec.unpadded_page_size_bytes / (place.num_slots * plan.page_size_bytes)
            x, width = left + place.slot * unit, place.num_slots * unit
            inset = 1.0 if width > 4 else 0.0
            title = f"{name}: {format_bytes(spec.unpadded_page_size_bytes)} in {place.num_slots} page(s)"
            if share < 1:
                parts.append(Rect(x, y, width - inset, row, "pad", f"{name}: page padding").svg())
            parts.append(Rect(x, y, (width - inset) * share, row, kind_class(spec), title).svg())
            used += place.num_slots
        if used < pages:
            x = left + used * unit
            parts.append(Rect(x, y, left + area - x - 1, row, "empty", f"{pages - used} empty page(s)").svg())
        parts.append(_text(WIDTH - right + 10, y + 17, _row_note(group, len(run)), "note"))
        y += row + gap
    return _svg(y, parts, "pages under the block ids of each group")


def _row_note(group: CacheGroup, count: int) -> str:
    note = f"{group.block_size} tokens a block"
    if group.blocks_per_state > 1:
        note = f"{group.blocks_per_state:,} blocks a state"
    return note if count == 1 else f"{note}, {count} groups"


def length_drawing(plan: CachePlan, truth: CachePlan, top_bytes: int, longest: int) -> str:
    """Bytes of one request over its length, stacked by kind, up to `longest` tokens and `top_bytes`; the
    dashed line is what a byte-exact allocator would hold of the layers as `truth` knows them.
    """
    left, right, top, height = 78, 20, 12, 190
    area = WIDTH / 2 - left - right
    lengths = [max(longest * i // 64, 1) for i in range(65)]
    stacks = _by_kind(plan, lengths)

    def x(i: int) -> float:
        return left + area * lengths[i] / longest

    def y(value: float) -> float:
        return top + height * (1 - value / top_bytes)

    parts = []
    for step in range(5):
        value = top_bytes * step / 4
        parts.append(
            f'<line x1="{left}" x2="{left + area:.1f}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="grid"/>'
        )
        parts.append(_text(left - 8, y(value) + 4, format_bytes(value), "note", "end"))
    below = [0.0] * len(lengths)
    for label, css, values in stacks:
        above = [b + v for b, v in zip(below, values, strict=True)]
        outline = [f"{x(i):.1f},{y(above[i]):.1f}" for i in range(len(lengths))]
        outline += [f"{x(i):.1f},{y(below[i]):.1f}" for i in reversed(range(len(lengths)))]
        title = f"{label}: {format_bytes(values[-1])} at {longest:,} tokens"
        parts.append(
            f'<polygon points="{" ".join(outline)}" class="{css}"><title>{escape(title)}</title></polygon>'
        )
        below = above
    need = [waste_of(truth, n, reserved=False).needed_bytes for n in lengths]
    points = " ".join(f"{x(i):.1f},{y(need[i]):.1f}" for i in range(len(lengths)))
    parts.append(f'<polyline points="{points}" class="need"><title>byte-exact</title></polyline>')
    for step in range(3):
        tokens = longest * step // 2
        anchor = ("start", "middle", "end")[step]
        parts.append(_text(left + area * step / 2, top + height + 18, f"{tokens:,} tokens", "note", anchor))
    return (
        f'<svg viewBox="0 0 {WIDTH / 2:.0f} {top + height + 26}" role="img" aria-label="bytes over length">'
        + "".join(parts)
        + "</svg>"
    )


def _by_kind(plan: CachePlan, lengths: Sequence[int]) -> list[tuple[str, str, list[float]]]:
    """(label, CSS class, bytes at each length) of every kind and reach, groups of one kind summed."""
    found: dict[tuple[str, str], list[float]] = {}
    for i, length in enumerate(lengths):
        for group, waste in zip(plan.groups, waste_by_group(plan, length), strict=True):
            key = (kind_label(group.spec), kind_class(group.spec))
            found.setdefault(key, [0.0] * len(lengths))[i] += waste.held_bytes
    order = list(KIND_CLASSES.values())
    stacks = [(label, css, values) for (label, css), values in found.items()]
    return sorted(stacks, key=lambda stack: -order.index(stack[1]) if stack[1] in order else 1)


def waste_drawing(plans: Mapping[str, CachePlan], truth: CachePlan, lengths: Sequence[int]) -> str:
    """Bars of the bytes that a request holds, as shares of what it needs: needed, then lost by cause.

    Bars beyond WIDEST_BAR times the need are cut off.
    """
    left, right, row, gap = 240, 110, 18, 6
    area = WIDTH - left - right
    wastes = [
        (name, n, waste_of(plan, n))
        for n in lengths
        for name, plan in plans.items()
        if n <= plan.max_model_len
    ]
    needed = {n: waste_of(truth, n).needed_bytes for n in lengths}
    widest = min(max((w.held_bytes / needed[n] for _, n, w in wastes), default=1.0), WIDEST_BAR)
    parts: list[str] = []
    y = 4.0
    for name, num_tokens, waste in wastes:
        parts.append(_text(0, y + 13, f"{name}, {num_tokens:,} tokens", "label"))
        need = needed[num_tokens]
        scale = area / widest / need
        x = float(left)
        shares = {"needed": need, "out_of_reach": waste.needed_bytes - need}
        shares |= {cause: getattr(waste, cause) for cause in CAUSES if cause not in shares}
        lost = 1 - (need + waste.reserved_states) / waste.held_bytes
        for cause, size in shares.items():
            title = (
                f"{CAUSES.get(cause, cause)}: {format_bytes(size)} ({100 * size / waste.held_bytes:.2f} %)"
            )
            width = min(size * scale, left + area - x)
            parts.append(Rect(x, y, width, row, f"c-{cause}", title).svg())
            x += width
        parts.append(_text(x + 8, y + 13, f"{100 * lost:.2f} % lost", "note"))
        y += row + gap
    return _svg(y, parts, "waste by cause")


def block_legend(plan: CachePlan) -> str:
    """A table row's worth of words for every group, for readers who cannot see the drawing."""
    return "; ".join(
        f"group {i}: {kind_label(group.spec)}, {short_names(group.layer_names)}"
        for i, group in enumerate(plan.groups)
    )


def nice_ceiling(value: float) -> int:
    """The next 1, 2 or 5 times a power of two KiB at or above the value, for the top of an axis."""
    step = 2 ** max(math.ceil(math.log2(max(value, 1024))) - 2, 0)
    return math.ceil(value / step) * step
