"""A replay as values that JSON holds, and as a table for people."""

from typing import Any

from jaxkv.lab.replay import Replay
from jaxkv.lab.trace import Trace
from jaxkv.memory_size import format_bytes
from jaxkv.planning.plan import CacheGroup, CachePlan
from jaxkv.specs import ChunkedLocalAttentionSpec, SlidingWindowSpec

SCHEMA = 1
"""Version of the report's form."""


def replay_report(trace: Trace, result: Replay, model: str) -> dict[str, Any]:
    """Everything that was measured. Tokens are prompt tokens of admitted requests, unless said otherwise."""
    counts, plan = result.recorder.counts, result.plan
    queries = max(1, counts.queries)
    return {
        "schema": SCHEMA,
        "partial": result.partial,
        "trace": _trace(trace),
        "model": model,
        "plan": _plan(plan),
        "settings": {
            "clock": result.settings.clock,
            "step_seconds": result.settings.step_seconds,
            "retention_interval": result.settings.retention_interval,
            "eviction": result.settings.eviction,
            "max_num_seqs": result.settings.max_num_seqs,
            "max_num_batched_tokens": result.settings.max_num_batched_tokens,
        },
        "requests": {
            "in_trace": result.num_requests,
            "admitted": counts.requests,
            "ended": result.num_ended,
            "refused": len(result.refused),
            "first_refusal": ": ".join(result.refused[0]) if result.refused else None,
        },
        "token_hit_rate": counts.hits / queries,
        "block_hit_rate": counts.hit_blocks / max(1, counts.query_blocks),
        "prompt_tokens": counts.queries,
        "hit_tokens": counts.hits,
        "could_serve": [
            {"group": group, "layers": name, "token_hit_rate": counts.could_serve[group] / queries}
            for group, name in _groups(plan)
        ],
        "tokens": {
            "hit": counts.hits,
            "never_computed": counts.never_computed,
            "granularity": counts.granularity,
            "lost": [
                {"group": group, "layers": group_name(plan.groups[group]), "cause": cause, "tokens": tokens}
                for (group, cause), tokens in sorted(counts.lost.items())
                if tokens
            ],
        },
        "recomputed_tokens": counts.recomputed,
        "recomputed_flops": counts.recomputed_flops,
        "saved_flops": counts.saved_flops,
        "evictions": [
            {"layers": name, "wanted": wanted, "unwanted": unwanted}
            for name, wanted, unwanted in _evictions(result)
        ],
        "states_kept": result.states_kept,
        "preemptions": result.num_preemptions,
        "resumed": {
            "admissions": counts.resumed,
            "tokens": counts.resumed_tokens,
            "hit_tokens": counts.resumed_hits,
        },
        "steps": result.num_steps,
        "seconds": result.seconds,
        "computed_tokens": result.num_computed,
        "generated_tokens": result.num_generated,
        "concurrency": {
            "mean": result.running_sum / max(1, result.num_steps),
            "most": result.most_running,
        },
        "pool": [
            {"ended": s.num_ended, "seconds": s.seconds, "held": s.held, "cached": s.cached}
            for s in result.samples
        ],
        "digest": result.recorder.digest,
    }


def group_name(group: CacheGroup) -> str:
    """What the group's layers keep, in a few words."""
    spec = group.spec
    if isinstance(spec, SlidingWindowSpec):
        return f"window of {spec.sliding_window:,} tokens"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"chunks of {spec.attention_chunk_size:,} tokens"
    return {"full": "full attention", "mla": "latent attention", "mamba": "recurrent state"}.get(
        spec.kind, spec.kind
    )


def _groups(plan: CachePlan) -> list[tuple[int, str]]:
    """The first group of each name that takes part in hits: groups alike serve alike."""
    named: dict[str, int] = {}
    for index, group in enumerate(plan.groups):
        if group.spec.prefix_cacheable:
            named.setdefault(group_name(group), index)
    return [(index, name) for name, index in named.items()]


def _evictions(result: Replay) -> list[tuple[str, int, int]]:
    """Units by name of the groups: those wanted by the retention policy, and the others."""
    evicted = result.recorder.evicted
    names = result.recorder.manager_groups
    return [
        (group_name(result.plan.groups[group]), evicted[number, True], evicted[number, False])
        for number, group in enumerate(names)
    ]


def _trace(trace: Trace) -> dict[str, Any]:
    return {
        "source": trace.source,
        "format": trace.format,
        "block_size": trace.block_size,
        "requests": len(trace.requests),
        "prompt_tokens": trace.num_prompt_tokens,
        "output_tokens": trace.num_output_tokens,
        "skipped_lines": trace.num_skipped_lines,
        "has_content": trace.has_content,
        "notes": list(trace.notes),
    }


def _plan(plan: CachePlan) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for group in plan.groups:
        kinds[group_name(group)] = kinds.get(group_name(group), 0) + 1
    return {
        "policy": plan.policy,
        "groups": kinds,
        "block_sizes": sorted({group.block_size for group in plan.groups}),
        "hash_block_size": plan.hash_block_size,
        "hit_alignment": plan.hit_alignment,
        "max_model_len": plan.max_model_len,
        "usable_blocks": plan.usable_blocks,
        "bytes": plan.pool_bytes,
        "requests_of_maximum_length": plan.usable_blocks / max(1, sum(plan.blocks_per_request)),
    }


def finer_blocks_note(trace: Trace, plan: CachePlan) -> str | None:
    """What must be said where hash blocks are finer than the trace's, or lie across them."""
    unit, size = trace.block_size, plan.hash_block_size
    if unit is None or size == unit or not trace.has_content:
        return None
    return (
        f"The trace tells prefixes in blocks of {unit} tokens and the cache hashes {size}: what prompts "
        f"share within a block of the trace is not seen, so the hit rate is a lower bound."
    )


def format_report(report: dict[str, Any]) -> str:
    """A table of the figures that matter most."""
    total = max(1, report["prompt_tokens"])

    def share(tokens: int) -> str:
        return f"{100 * tokens / total:7.2f} %  {tokens:>15,} tokens"

    trace, plan, requests = report["trace"], report["plan"], report["requests"]
    lines = [
        f"{trace['source']} ({trace['format']}): {requests['in_trace']:,} requests",
        f"{report['model']}, {plan['policy']}: {format_bytes(plan['bytes'])}, "
        f"{plan['usable_blocks']:,} blocks, room for "
        f"{plan['requests_of_maximum_length']:.2f} requests of {plan['max_model_len']:,} tokens",
        f"hits end at multiples of {plan['hit_alignment']:,} tokens",
        "",
        f"token hit rate {report['token_hit_rate']:.4f}, block hit rate {report['block_hit_rate']:.4f}",
        f"  hit                                    {share(report['tokens']['hit'])}",
    ]
    for loss in report["tokens"]["lost"]:
        words = f"{loss['cause']}: {loss['layers']}"
        lines.append(f"  {words:<38} {share(loss['tokens'])}")
    lines += [
        f"  end of a block, last token             {share(report['tokens']['granularity'])}",
        f"  never computed before                  {share(report['tokens']['never_computed'])}",
        "",
        *(
            f"alone, {one['layers']} could have served {100 * one['token_hit_rate']:.2f} %"
            for one in report["could_serve"]
        ),
        f"computed again: {report['recomputed_tokens']:,} tokens, {report['recomputed_flops']:.3g} FLOPs "
        f"(hits saved {report['saved_flops']:.3g})",
        f"steps {report['steps']:,}, running {report['concurrency']['mean']:.1f} on average and "
        f"{report['concurrency']['most']} at most, {report['preemptions']:,} preemptions",
        *(
            f"evicted, {one['layers']}: {one['wanted']:,} wanted and {one['unwanted']:,} unwanted units"
            for one in report["evictions"]
        ),
    ]
    if report["states_kept"]:
        lines.append(f"recurrent states kept at the end: {report['states_kept']:,}")
    if requests["refused"]:
        lines.append(f"refused: {requests['refused']:,} requests; the first: {requests['first_refusal']}")
    if trace["skipped_lines"]:
        lines.append(f"bad lines passed over: {trace['skipped_lines']:,}")
    lines += [f"note: {note}" for note in trace["notes"]]
    if report["partial"]:
        lines.append(f"PARTIAL: interrupted after {requests['ended']:,} of {requests['in_trace']:,} requests")
    lines.append(f"digest {report['digest']}")
    return "\n".join(lines)
