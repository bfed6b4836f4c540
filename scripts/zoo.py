"""Plans every model whose configuration is in tests/model_config/data/configs, and writes docs/zoo.md.

    python scripts/zoo.py [--output docs/zoo.md] [--no-host-cost]

For every model: what requests of 1k, 8k and 128k tokens lose under policy `unified`, under `split` and with
the hybrid manager off; how many tokens a pool holds, beside what an allocator without blocks would; and
what the plan costs the host. The host's times are of this run's machine: read their ratios.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxkv.errors import JaxkvError
from jaxkv.memory_size import format_bytes
from jaxkv.model_config.model_cache import ModelCache, model_cache_from_config
from jaxkv.planning import CachePlan, PlanConfig, make_plan, steady_concurrency, waste_of
from jaxkv.planning.split_search import GROUP_COST, MAX_GROUPS, REFERENCE_LENGTHS
from jaxkv.planning.study import HYBRID_OFF
from jaxkv.planning.waste import mean_wasted_fraction

try:
    from scripts.zoo_host_cost import decode_step_microseconds
except ImportError:  # run as a script: scripts/ itself is on the path
    from zoo_host_cost import decode_step_microseconds

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests" / "model_config" / "data" / "configs"
LENGTHS = (1024, 8192, 131072)
POOL_BYTES = 64 * 2**30
MAX_MODEL_LEN = 131072
WAYS = ("split", "unified", HYBRID_OFF)


class ZooRow(NamedTuple):
    """One model. plans: by way, None where it is refused. refused: why there is no plan at all."""

    name: str
    plans: dict[str, CachePlan | None]
    refused: str | None = None

    @property
    def truth(self) -> CachePlan:
        """The plan that knows what the layers need."""
        plan = self.plans["split"]
        if plan is None:
            raise JaxkvError(f"{self.name} has no plan")
        return plan

    def waste(self, way: str, num_tokens: int) -> float | None:
        """Share of a request's bytes that is lost, the mean around `num_tokens` tokens."""
        plan = self.plans.get(way)
        return None if plan is None else mean_wasted_fraction(plan, num_tokens, self.truth)

    def capacity(self, way: str, num_tokens: int) -> int | None:
        """Tokens of the pool when all requests that decode have `num_tokens`."""
        plan = self.plans.get(way)
        return None if plan is None else int(steady_concurrency(plan, num_tokens).requests * num_tokens)

    def bound(self, num_tokens: int) -> int:
        """Tokens that an allocator without blocks would hold, with the same reserved states."""
        waste = waste_of(self.truth, num_tokens)
        return POOL_BYTES * num_tokens // (waste.needed_bytes + waste.reserved_states)


def read_zoo() -> list[ZooRow]:
    """Every model of the folder, planned in every way."""
    return [_row(path) for path in sorted(CONFIGS.glob("*.json"))]


def _row(path: Path) -> ZooRow:
    try:
        cache = model_cache_from_config(json.loads(path.read_text()), path.stem)
    except JaxkvError as error:
        return ZooRow(path.stem, {}, str(error))
    return ZooRow(path.stem, {way: zoo_plan(cache, way) for way in WAYS})


def zoo_plan(cache: ModelCache, way: str, alignment: int = 4096) -> CachePlan | None:
    """The model's plan in one way, for requests of up to MAX_MODEL_LEN tokens; None where it is refused."""
    config = PlanConfig(
        policy="unified" if way == HYBRID_OFF else way,
        disable_hybrid_kv_cache_manager=way == HYBRID_OFF,
        max_model_len=MAX_MODEL_LEN,
        page_alignment_bytes=alignment,
        align_hybrid_blocks=True,
        auto_fit_max_model_len=False,
    )
    try:
        return make_plan(cache.specs(16), config, POOL_BYTES)
    except JaxkvError:
        return None


def zoo_page(rows: Sequence[ZooRow], host_cost: bool) -> str:
    """docs/zoo.md."""
    planned = [row for row in rows if row.refused is None]
    parts = [
        _HEAD.format(
            pool=format_bytes(POOL_BYTES),
            count=len(planned),
            total=len(rows),
            group_cost=100 * GROUP_COST,
            max_groups=MAX_GROUPS,
            first=REFERENCE_LENGTHS[0],
            second=REFERENCE_LENGTHS[1],
        ),
        _summary(planned),
        "## Waste\n\n" + _waste_table(planned),
        "## Capacity\n\n" + _CAPACITY + _capacity_table(planned),
        "## Groups and what they cost the host\n\n" + _GROUPS + _groups_table(planned, host_cost),
        "## Not planned\n\n" + "\n".join(f"- {row.name}: {row.refused}." for row in rows if row.refused),
    ]
    return "\n\n".join(parts) + "\n"


def above(rows: Sequence[ZooRow], num_tokens: int, limit: float) -> list[str]:
    """Names of the models that lose more than `limit` under split."""
    return [row.name for row in rows if (row.waste("split", num_tokens) or 0) > limit]


def _summary(rows: Sequence[ZooRow]) -> str:
    worst = max(rows, key=lambda row: row.waste("split", 8192) or 0)
    late = above(rows, 1024, 0.05)
    share = 100 * (worst.waste("split", 8192) or 0)
    sentence = (
        f"With `split` no model loses more than {share:.2f} % at 8k tokens ({worst.name}), and "
        f"{len(rows) - len(late)} of {len(rows)} lose at most 5 % at 1k."
    )
    if late:
        sentence += f" The others: {'; '.join(_why(row) for row in rows if row.name in late)}."
    return sentence


def _why(row: ZooRow) -> str:
    """The largest loss at 1k tokens, in words."""
    waste = waste_of(row.truth, 1025, reserved=False)
    causes = {
        "a state is a whole number of pages, and its last is little filled": waste.page_padding,
        "a short window touches one block more than it fills": waste.block_tail,
        "layer slots stay empty": waste.padding_layers,
    }
    return f"{row.name} ({max(causes, key=lambda cause: causes[cause])})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _waste_table(rows: Sequence[ZooRow]) -> str:
    head = ["model", *(f"{way} {_short(n)}" for way in ("split", "unified", "off") for n in LENGTHS)]
    body = [[row.name, *(_percent(row.waste(way, n)) for way in WAYS for n in LENGTHS)] for row in rows]
    return _table(head, body)


def _capacity_table(rows: Sequence[ZooRow]) -> str:
    head = ["model", *(f"{way} {_short(n)}" for n in LENGTHS for way in ("bound", "split", "unified", "off"))]
    body = []
    for row in rows:
        cells = [row.name]
        for n in LENGTHS:
            cells.append(_thousands(row.bound(n)))
            cells += [_thousands(row.capacity(way, n)) for way in WAYS]
        body.append(cells)
    return _table(head, body)


def _groups_table(rows: Sequence[ZooRow], host_cost: bool) -> str:
    head = [
        "model",
        "groups split",
        "unified",
        "block split",
        "unified",
        "hits from, split",
        "unified",
        "lost at 8k, split",
    ]
    head += ["decode step split, µs", "unified, µs"] if host_cost else []
    body = []
    for row in rows:
        plans = [row.plans["split"], row.plans["unified"]]
        cells = [row.name]
        cells += ["-" if plan is None else str(len(plan.groups)) for plan in plans]
        cells += ["-" if plan is None else _blocks(plan) for plan in plans]
        cells += ["-" if plan is None else f"{plan.hit_alignment:,}" for plan in plans]
        cells.append(_percent(row.waste("split", 8192)))
        if host_cost:
            cells += ["-" if plan is None else f"{decode_step_microseconds(plan):.0f}" for plan in plans]
        body.append(cells)
    return _table(head, body)


def _blocks(plan: CachePlan) -> str:
    return "/".join(str(size) for size in dict.fromkeys(group.block_size for group in plan.groups))


def _short(num_tokens: int) -> str:
    return f"{num_tokens // 1024}k"


def _thousands(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens / 1000:,.0f}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join(["---", *["---:"] * (len(head) - 1)])]
    return "\n".join(f"| {line} |" for line in [*lines, *(" | ".join(cells) for cells in body)])


_HEAD = """# The zoo: {total} published models, planned

Written by `python scripts/zoo.py`. {count} of {total} models are planned, for requests of up to 128k tokens
(whatever the model's own maximum) from a pool of {pool}, bfloat16 keys and values, states in the dtypes
vLLM picks, blocks of 16 tokens where the policy does not make them larger, pages of whole 4 KiB tiles.

- `unified` equals vLLM 0.33's plans, with attention blocks grown to cover recurrent states; `off` is the
  same with the hybrid manager off, where windows keep every token and recurrent models are refused.
- `split` keeps a page as small as one attention layer's block and spreads states over as many pages as they
  need. The page and the group size are searched: the cost is the mean share of bytes that requests of
  {first:,} and {second:,} tokens lose, plus {group_cost:.2f} % for every group; more than {max_groups} groups
  are avoided.
- Waste is the share of a request's bytes that the layout loses (empty slots, page padding, ends of blocks;
  with the manager off also tokens out of reach), the mean over lengths spread over one scheduler block around
  the length, with one recurrent state. Reserved states are kept on purpose and count as neither."""

_CAPACITY = """Thousands of tokens in the pool while requests of one length decode, reserved states included.
The bound is an allocator without blocks that keeps the same states.

"""

_GROUPS = f"""A group more is a block table more on the device; on the host, groups of one spec share a
manager. The rule: a group must save {100 * GROUP_COST:.2f} % of a request's bytes to be worth having, and
{MAX_GROUPS} are the most. The decode step is the manager's processor time for 32 requests, a mean over 32
steps, the best of three rounds. Recurrent models take more of it under `split`: their blocks end after 16
tokens, not after hundreds, and prefixes hit as finely.

"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "zoo.md")
    parser.add_argument("--no-host-cost", action="store_true", help="leave the timings out")
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(zoo_page(read_zoo(), not args.no_host_cost), encoding="utf-8")
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
