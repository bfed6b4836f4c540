"""Replay: hits worked out by hand or by brute force, and what is said of the rest of the tokens."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.lab.content import PrefixIds, Tokens
from jaxkv.lab.generator import generate
from jaxkv.lab.loading import load_trace
from jaxkv.lab.replay import Replay, replay
from jaxkv.lab.settings import CLOCKS, ReplaySettings, blocks_for_everything
from jaxkv.lab.trace import Trace
from jaxkv.specs import KVCacheSpec
from tests.lab.replays import full, plan_of, state, trace_of, window

DATA = Path(__file__).parent / "data"
SETTINGS = ReplaySettings(max_num_batched_tokens=64, max_num_seqs=16)


def hits(result: Replay) -> int:
    return result.recorder.counts.hits


def run(trace: Trace, *specs: KVCacheSpec, num_blocks: int = 2000, **settings: object) -> Replay:
    plan = plan_of(specs, num_blocks)
    return replay(trace, plan, dataclasses.replace(SETTINGS, **settings))  # type: ignore[arg-type]


def prefixes(trace: Trace, unit: int) -> int:
    """Token hits of an endless cache of full attention, straight from the definition: a prompt hits the
    longest prefix of whole units, without its last token, that some computed sequence began with. The
    sequences so far are a tree of units."""
    tree: dict[tuple[int, object], int] = {}

    def walk(words: Sequence[object], grow: bool) -> int:
        node, depth = 0, 0
        for word in words:
            if (node, word) not in tree and not grow:
                return depth
            node, depth = tree.setdefault((node, word), len(tree) + 1), depth + 1
        return depth

    total = 0
    for request in trace.requests:
        content = request.content
        if isinstance(content, PrefixIds):
            prompt: Sequence[object] = [
                i for run in content.runs for i in range(run.first, run.first + run.length)
            ][: request.num_prompt_tokens // unit]
            computed = prompt
        else:
            assert isinstance(content, Tokens)
            tokens = [*content.prompt.tolist(), *content.answer.tolist()]
            cut = [tuple(tokens[i : i + unit]) for i in range(0, len(tokens), unit)]
            prompt = cut[: request.num_prompt_tokens // unit]
            # The answer's last token is never computed.
            computed = cut[: (len(tokens) - 1) // unit]
        total += min(walk(prompt, grow=False), (request.num_prompt_tokens - 1) // unit) * unit
        walk(prompt, grow=True)
        walk(computed, grow=True)
    return total


def test_a_prompt_hits_whole_blocks_and_never_its_last_token() -> None:
    trace = trace_of((12, [1, 2, 3]), (13, [1, 2, 3]), (12, [1, 2, 3]), (12, [1, 2, 4]), (3, [1]))
    # Nothing; all three blocks; two of them, for the last token is computed; two; no whole block.
    assert hits(run(trace, full())) == 0 + 12 + 8 + 8 + 0
    counts = run(trace, full()).recorder.counts
    assert (counts.requests, counts.queries, counts.never_computed) == (5, 52, 12 + 1 + 0 + 4 + 0)
    # The third prompt could not use its last 4 tokens, the last one its 3.
    assert counts.granularity == 4 + 3


def test_the_part_of_a_block_that_an_id_stands_for_counts_as_shared() -> None:
    trace = trace_of((10, [1, 2, 3]), (10, [1, 2, 3]))
    counts = run(trace, full()).recorder.counts
    assert (counts.hits, counts.granularity, counts.never_computed) == (8, 2, 10)


def test_finer_blocks_than_the_traces_hit_what_the_ids_prove() -> None:
    trace = trace_of((32, [1, 2]), (24, [1, 3]), (32, [1, 2]), unit=16)
    # The whole first id, 16 tokens; then 28 of 32, for the last block has the last token.
    assert hits(run(trace, full())) == 16 + 28


@pytest.mark.parametrize("unit", [4, 8])
@pytest.mark.parametrize("pattern", ["chat", "document", "resend", "mixed"])
def test_an_endless_cache_agrees_with_the_set_of_all_prefixes(pattern: str, unit: int) -> None:
    trace = generate(pattern, 6 if pattern == "document" else 10, seed=5)
    short = [
        dataclasses.replace(
            request,
            num_prompt_tokens=min(request.num_prompt_tokens, 900),
            content=Tokens(request.content.prompt[:900], request.content.answer),
        )
        for request in trace.requests
        if isinstance(request.content, Tokens)
    ]
    trace = dataclasses.replace(trace, requests=short)
    plan = plan_of([full(unit)], block_size=unit)
    plan = dataclasses.replace(plan, num_blocks=blocks_for_everything(plan, trace))
    result = replay(trace, plan, SETTINGS)
    assert hits(result) == prefixes(trace, unit) > 0
    assert not sum(result.recorder.counts.lost.values())


@pytest.mark.parametrize(("name", "unit"), [("weka_two.jsonl", 64), ("mooncake_head.jsonl", 512)])
def test_recorded_traces_agree_with_the_set_of_all_prefixes(name: str, unit: int) -> None:
    trace = load_trace(str(DATA / name))
    plan = plan_of([full(unit)], block_size=unit, max_model_len=1_000_000)
    plan = dataclasses.replace(plan, num_blocks=blocks_for_everything(plan, trace))
    assert hits(replay(trace, plan, SETTINGS)) == prefixes(trace, unit)


def test_a_window_hits_less_where_its_blocks_were_not_kept() -> None:
    """A branch 20 tokens before the end of a prompt: the blocks of a window of 8 below it were given out."""
    long, branch = (40, list(range(10))), (24, [*range(5), 20])
    fillers = [(40, list(range(start, start + 10))) for start in (100, 200, 300)]
    counts = run(trace_of(long, *fillers, branch), full(), window(), num_blocks=54).recorder.counts
    lost = {key: tokens for key, tokens in counts.lost.items() if tokens}
    assert counts.hits + sum(lost.values()) == 20
    assert counts.hits == 0


def test_what_full_attention_lost_was_evicted() -> None:
    prompts = [(40, list(range(start, start + 10))) for start in (0, 100, 200, 0)]
    counts = run(trace_of(*prompts), full(), num_blocks=22).recorder.counts
    # 21 blocks: the third prompt takes the room of the first, end first, but for one block.
    assert counts.hits + counts.lost[0, "evicted"] == 36
    assert counts.lost[0, "evicted"] > 0


MIXES = {"full": [full()], "windows": [full(), window(), window()], "states": [full(), window(), state()]}


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("mix", MIXES)
def test_counted_steps_decide_what_scheduled_ones_do(mix: str, clock: str) -> None:
    trace = trace_of(
        *[(30 + 7 * i % 40, [*range(3 + i % 4), *range(50 * i, 50 * i + 20)]) for i in range(30)],
        answer=37,
        gap=0.3,
    )
    plan = plan_of(MIXES[mix], 200)
    settings = dataclasses.replace(SETTINGS, clock=clock)
    counted, scheduled = (replay(trace, plan, settings, count_steps=flag) for flag in (True, False))
    assert counted.recorder.digest == scheduled.recorder.digest
    for name in ("num_steps", "seconds", "running_sum", "num_computed", "num_generated", "num_preemptions"):
        assert getattr(counted, name) == pytest.approx(getattr(scheduled, name)), name
    assert counted.recorder.counts == scheduled.recorder.counts
    assert counted.num_ended == 30


@pytest.mark.parametrize("mix", MIXES)
def test_every_token_of_a_prompt_is_accounted_for(mix: str) -> None:
    trace = generate("mixed", 25, seed=2)
    for num_blocks in (4_000, 20_000):
        result = run(trace, *MIXES[mix], num_blocks=num_blocks)
        counts = result.recorder.counts
        parts = counts.hits + counts.never_computed + counts.granularity + sum(counts.lost.values())
        assert parts == counts.queries
        assert counts.hits == result.num_hits_counted
        assert min(counts.lost.values(), default=0) >= 0


def test_the_trace_clock_runs_requests_beside_each_other() -> None:
    trace = trace_of(*[(8, [10 * i, 10 * i + 1]) for i in range(6)], answer=100, gap=0.02)
    result = run(trace, full(), clock="trace")
    assert result.most_running == 6
    # The last arrives after 5 steps and takes 100.
    assert result.num_steps == 105
    assert run(trace, full()).most_running == 1


def test_requests_that_can_never_run_are_counted_with_the_reason() -> None:
    trace = trace_of((4000, list(range(1000))), (8, [1, 2]))
    result = run(trace, full(), num_blocks=100)
    assert (result.num_ended, len(result.refused)) == (1, 1)
    assert "request 0" in result.refused[0][0]
    assert "blocks" in result.refused[0][1]


def test_an_interrupt_keeps_what_was_measured() -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    trace = trace_of(*[(12, [1, 2, 3])] * 5)
    result = replay(trace, plan_of([full()]), SETTINGS, progress=interrupt)
    assert (result.partial, result.num_ended) == (True, 2)
    assert result.recorder.counts.hits == 8


def test_settings_are_refused_by_value() -> None:
    with pytest.raises(JaxkvError, match="unknown clock 'fast'"):
        ReplaySettings(clock="fast")
    with pytest.raises(JaxkvError, match="more than 0 seconds, got 0"):
        ReplaySettings(step_seconds=0)


_PROGRAM = """
from tests.lab.test_replay import MIXES, run
from jaxkv.lab.generator import generate
trace = generate("mixed", 12, seed=3)
print(run(trace, *MIXES["states"], num_blocks=3000, clock="as-fast-as-possible").recorder.digest)
"""


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64
