"""A study as text for a terminal: the model, the machine, the plan, and the ways to plan side by side."""

from collections.abc import Sequence
from typing import Any

from jaxkv.memory_size import format_bytes
from jaxkv.planning.study import PlanStudy, study_report
from jaxkv.planning.table import columns, format_plan
from jaxkv.specs import MambaSpec

ENGINE_DEFAULTS = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "num_prefill_checkpoints": 1}
"""Those of jaxkv.engine's LLM, which this side does not import."""


def format_study(study: PlanStudy) -> str:
    """Everything about one model."""
    report = study_report(study)
    title = f"{study.name}: {report['cache_dtype']} cache, policy {study.plan.policy}"
    sections = [
        format_plan(study.plan, title, report),
        _model_and_machine(study, report),
        "  side by side\n\n" + columns(_ways(study)),
    ]
    sections += [f"  {name}: {why}" for name, why in study.others.items() if isinstance(why, str)]
    sections += [f"  warning: {warning}" for warning in study.warnings]
    return "\n\n".join(sections)


def _model_and_machine(study: PlanStudy, report: dict[str, Any]) -> str:
    machine = report["machine"]
    rows = [
        ("assumed", _assumed(study)),
        ("caches", ", ".join(f"{count} {kind}" for kind, count in report["layers_by_kind"].items())),
        (
            "bytes",
            f"{report['growing_bytes_per_token']:,} B a token, {_beside(report)}"
            f"{format_bytes(report['waste'][-1]['held_bytes'])} a sequence of "
            f"{report['waste'][-1]['num_tokens']:,} tokens",
        ),
        (
            "machine",
            f"{machine['chips']} x {machine['accelerator']}, tensor parallel {machine['tensor_parallel']}, "
            f"data parallel {machine['data_parallel']}: "
            f"{machine['requests_of_max_model_len']:.2f} requests of {report['max_model_len']:,} tokens "
            "in all",
        ),
    ]
    budget = machine["budget"]
    if budget is not None:
        rows.append(
            (
                "memory of a chip",
                f"{format_bytes(budget['chip_bytes'])} = {format_bytes(budget['weight_bytes'])} weights + "
                f"{format_bytes(budget['activation_bytes'])} activations + "
                f"{format_bytes(budget['runtime_bytes'])} kept free + "
                f"{format_bytes(machine['cache_bytes_per_chip'])} cache",
            )
        )
    if report.get("parameters"):
        rows.append(("weights", f"{report['parameters'] / 1e9:.2f} billion in {report['weight_dtype']}"))
    return columns(rows)


def _assumed(study: PlanStudy) -> str:
    """How requests are served in this plan, and how the engine serves them unless told otherwise."""
    config = study.config
    here = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_prefill_checkpoints": study.plan.limits.num_prefill_checkpoint_blocks,
    }
    if not any(isinstance(spec, MambaSpec) for spec in study.specs.values()):
        del here["num_prefill_checkpoints"]
    settings = ", ".join(f"{name} {value:,}" for name, value in here.items())
    engine = ", ".join(f"{ENGINE_DEFAULTS[name]:,}" for name in here)
    return f"{settings}; an LLM plans with {engine} unless told otherwise"


def _beside(report: dict[str, Any]) -> str:
    """What a request holds however long it is, where it holds such."""
    parts = ((report["window_bytes"], "in full windows"), (report["bytes_per_state"], "a state"))
    return "".join(f"{format_bytes(size)} {name}, " for size, name in parts if size)


def _ways(study: PlanStudy) -> list[tuple[str, ...]]:
    reports = study.reports
    lengths = sorted({entry["num_tokens"] for report in reports.values() for entry in report["lengths"]})
    rows = [("", *reports)]
    rows.append(("groups", *(str(len(report["groups"])) for report in reports.values())))
    rows.append(("page", *(format_bytes(report["page_size_bytes"]) for report in reports.values())))
    rows.append(("block, tokens", *(_block_sizes(report) for report in reports.values())))
    rows.append(("hits in steps of", *(f"{report['hit_alignment']:,} tokens" for report in reports.values())))
    for length in lengths:
        found = [
            next((e for e in report["lengths"] if e["num_tokens"] == length), None)
            for report in reports.values()
        ]
        rows.append(
            (
                f"{length:,} tokens at once",
                *(
                    f"{e['requests']:,.1f} ({100 * e['mean_wasted_fraction']:.2f} % lost)" if e else "-"
                    for e in found
                ),
            )
        )
    return rows


def _block_sizes(report: dict[str, Any]) -> str:
    return "/".join(str(size) for size in dict.fromkeys(group["block_size"] for group in report["groups"]))


def format_comparison(studies: Sequence[PlanStudy]) -> str:
    """Several models in one table."""
    rows = [
        (
            "model",
            "caches",
            "B a token",
            "windows",
            "state",
            "policy",
            "groups",
            "block",
            "hits from",
            "cache of a chip",
            "at once, 8k",
            "at once, longest",
            "lost at 8k",
        )
    ]
    for study in studies:
        report = study_report(study)
        at_8k = next((e for e in report["lengths"] if e["num_tokens"] >= 8192), report["lengths"][-1])
        rows.append(
            (
                study.name,
                " + ".join(f"{count} {kind}" for kind, count in report["layers_by_kind"].items()),
                f"{report['growing_bytes_per_token']:,}",
                format_bytes(report["window_bytes"]) if report["window_bytes"] else "-",
                format_bytes(report["bytes_per_state"]) if report["bytes_per_state"] else "-",
                report["policy"],
                str(len(report["groups"])),
                _block_sizes(report),
                f"{report['smallest_prefix_that_can_hit']:,}",
                format_bytes(study.memory_bytes),
                f"{at_8k['requests']:,.1f}",
                f"{report['steady_concurrency']:,.1f} of {report['max_model_len']:,}",
                f"{100 * at_8k['mean_wasted_fraction']:.2f} %",
            )
        )
    return columns(rows)
