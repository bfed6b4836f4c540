"""Random traffic through the scheduler, every step of it run on the shadow and checked."""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxkv.request import Request
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.output import SchedulerOutput
from jaxkv.scheduling.scheduler import Scheduler
from tests.properties.block_view import BlockView
from tests.properties.shadow import PrefixIds, Shadow, StateBlocks, StepRow
from tests.properties.shadow_tier import SavingTier, ShadowTier, TierError, TierKind
from tests.properties.workload import LIMIT, CacheCase, PromptSource

END_TOKEN = 2

#: A request may lose its blocks to older ones that keep coming back, but never again and again for nothing.
MAX_PREEMPTIONS_WITHOUT_PROGRESS = 2


@dataclass
class Tracked:
    """A request, the tokens it will have (known before they are sampled), and what happened to it."""

    request: Request
    salt: str | None
    tokens: list[int]
    prefixes: np.ndarray
    tables: list[list[int]] = field(default_factory=list)
    states: dict[int, StateBlocks] = field(default_factory=dict)
    best: int = 0
    fruitless_preemptions: int = 0


class InFlight(NamedTuple):
    """A step, what the model says after each row: the drafts that were right, and the next token; and the
    blocks that it writes.
    """

    output: SchedulerOutput
    sampled: list[list[int]]
    written: set[int]


class SchedulerDriver:
    """Adds, aborts and resets at random while steps run; checks every step against the shadow.

    Sampled tokens are fixed by the request and the position, so that steps may overlap. tier: keeps content
    outside the pool; None: there is none. num_drafts: tokens, right or wrong, that are proposed at most.
    """

    def __init__(
        self,
        case: CacheCase,
        seed: int,
        *,
        max_num_seqs: int = 4,
        threshold: int = 0,
        tier: TierKind | None = None,
        num_drafts: int = 0,
    ) -> None:
        self.case = case
        self.rng = random.Random(seed)
        self.plan = case.plan()
        self.manager = case.manager()
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            long_prefill_token_threshold=threshold,
            async_scheduling=case.batches_in_flight == 2,
            num_speculative_tokens=num_drafts,
        )
        self.view = BlockView(self.manager)
        self.shadow = Shadow(case.rules, case.num_blocks)
        self.tier: ShadowTier | None = None
        if tier is not None:
            make_tier = self.rng.choice([ShadowTier, SavingTier])
            self.tier = make_tier(self.manager, self.shadow, self.rng, tier)
            self.tier.being_written = lambda: set[int]().union(*(step.written for step in self.in_flight))
        self.scheduler = Scheduler(self.plan, self.manager, config, connector=self.tier)
        self.prefix_ids = PrefixIds()
        self.prompts = PromptSource(self.rng)
        self.live: dict[str, Tracked] = {}
        self.in_flight: list[InFlight] = []
        self.holding: set[str] = set()
        self.num_requests = 0
        self.num_ops = 0
        self.num_finished = 0
        self.num_errors = 0

    def run(self, num_steps: int, arrival_rate: float = 0.5) -> None:
        """`num_steps` steps with arrivals and aborts, then without until all requests have ended."""
        for _ in range(num_steps):
            if self.rng.random() < arrival_rate and len(self.live) < 12:
                self.add()
            if self.live and self.rng.random() < 0.03:
                self.abort()
            if self.rng.random() < 0.02:
                self.manager.reset_prefix_cache()
            if self.tier is not None and self.rng.random() < 0.3:
                self._forget_free_blocks()
            self.step()
        self.drain()

    def _forget_free_blocks(self) -> None:
        """As if room had been needed: a tier is only asked for what the pool does not have."""
        pool = self.manager.pool
        for manager in self.manager.managers:
            leaders = pool.cached_units(manager.number)
            pool.forget(manager.number, leaders[pool.refs[leaders] == 0])

    def drain(self) -> None:
        """Everybody ends: at least one token is computed in every few steps."""
        if self.tier is not None and self.tier.kind == "unreliable":
            self.tier.kind = "meanwhile"
        idle = 0
        while self.live:
            num_errors = self.num_errors
            idle = 0 if self.step() or not self._is_tier_idle() or self.num_errors > num_errors else idle + 1
            waiting = [r.request_id for r in self.scheduler.waiting_requests()]
            assert idle <= 2 * self.case.batches_in_flight, f"nothing runs, and {waiting} wait"
        while self.in_flight:
            self._settle()
        self.step()
        while not self._is_tier_idle():
            self.step()
        assert self.manager.num_free_blocks == self.plan.usable_blocks, "blocks are held when nothing runs"
        assert self.manager.reset_prefix_cache()

    def add(self) -> None:
        salt = self.rng.choice([None, None, None, "tenant"])
        prompt = self.prompts.prompt(self.rng.choice([8, 30, LIMIT - 1]))
        max_tokens = self.rng.choice([1, self.rng.randint(1, 40), LIMIT])
        request = Request(
            f"r{self.num_requests}", prompt, max_tokens, cache_salt=salt, end_token_ids=(END_TOKEN,)
        )
        self.num_requests += 1
        tokens = prompt + self.rng.choices([0, 1, END_TOKEN], [10, 5, 1], k=max_tokens + 1)
        prefixes = self.prefix_ids.of(salt, tokens)
        # A plan holds blocks for a request of the maximum length, so none of these may be refused.
        self.scheduler.add_request(request)
        self.live[request.request_id] = Tracked(request, salt, tokens, prefixes)

    def abort(self) -> None:
        request_id = self.rng.choice(list(self.live))
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        del self.live[request_id]

    def step(self) -> int:
        """One call of `schedule`, and the results of the oldest step where no more may be in flight."""
        self.num_ops += 1
        try:
            output = self.scheduler.schedule()
        except TierError:
            self.num_errors += 1
            self.check()
            if self.in_flight and self.rng.random() < 0.5:
                self._settle()
            return 0
        for request_id in output.preempted:
            self._preempted(request_id)
        self.in_flight.append(self._execute(output))
        self.check()
        # Overlapping steps: now and then the results come at once.
        while self.in_flight and (
            len(self.in_flight) >= self.case.batches_in_flight or not len(output) or self.rng.random() < 0.1
        ):
            self._settle()
        if (most := self.scheduler.config.num_speculative_tokens) and not self.in_flight:
            self._propose(most)
        return output.total_num_scheduled_tokens

    def _propose(self, most: int) -> None:
        """Drafts for some: right ones, then wrong ones, of which some are right by chance."""
        drafts: dict[str, list[int]] = {}
        for request_id, tracked in self.live.items():
            if self.rng.random() < 0.8:
                start = tracked.request.num_tokens
                right = tracked.tokens[start : start + self.rng.randint(0, most)]
                wrong = self.rng.choices([0, 1, END_TOKEN], k=self.rng.randint(0, most))
                drafts[request_id] = right + wrong
        self.scheduler.update_draft_token_ids(drafts)

    def _is_tier_idle(self) -> bool:
        return self.tier is None or self.tier.idle

    def _preempted(self, request_id: str) -> None:
        tracked = self.live[request_id]
        tracked.tables, tracked.states = [], {}
        # It must have come further than the last time it lost its blocks.
        reached = tracked.request.num_tokens
        tracked.fruitless_preemptions = 0 if reached > tracked.best else tracked.fruitless_preemptions + 1
        tracked.best = max(tracked.best, reached)
        assert tracked.fruitless_preemptions <= MAX_PREEMPTIONS_WITHOUT_PROGRESS, (
            f"{request_id} was preempted {tracked.request.num_preemptions} times and gets nowhere"
        )

    def _execute(self, output: SchedulerOutput) -> InFlight:
        assert output.total_num_scheduled_tokens == output.num_scheduled.sum()
        assert output.total_num_scheduled_tokens <= self.case.max_num_batched_tokens
        assert len(set(output.request_ids.tolist())) == len(output)
        assert (output.num_scheduled[: output.num_decodes] == 1).all()
        assert not set(output.preempted) & set(output.request_ids), "a request lost its blocks and runs"
        arrays = output.token_arrays(self.scheduler.table)
        rows: list[StepRow] = []
        sampled: list[list[int]] = []
        ends: list[int] = []
        num_drafts = [0] * len(output) if output.num_drafts is None else output.num_drafts.tolist()
        for index, request_id in enumerate(output.request_ids.tolist()):
            tracked = self.live[request_id]
            start = int(output.num_computed[index])
            stop = start + int(output.num_scheduled[index])
            known = arrays.tokens[arrays.query_starts[index] : arrays.query_starts[index + 1]]
            certain = stop - num_drafts[index]
            drafts = known[certain - start :].tolist()
            expected = np.array(tracked.tokens[start:certain])
            known = known[: certain - start]
            assert ((known == expected) | (known < 0)).all(), "a row computes other tokens than its request's"
            row = self._row(tracked, start, stop)
            if drafts:
                prefixes = self.prefix_ids.of(tracked.salt, tracked.tokens[:certain] + drafts)
                row = row._replace(prefixes=prefixes)
            rows.append(row)
            right = [a == b for a, b in zip(drafts, tracked.tokens[certain:stop], strict=False)]
            ends.append(certain + [*right, False].index(False))
            sampled.append(tracked.tokens[certain : ends[-1] + 1])
        copies = self.manager.take_block_copies()
        self.shadow.copy(copies.sources, copies.targets)
        self.shadow.run_step(rows)
        for row, end in zip(rows, ends, strict=True):
            # The states that stay are those after the last token that was right.
            for state in row.states.values():
                self.shadow.contents[state.write, 0] = row.prefixes[end - 1]
        sizes = [rule.block_size for rule in self.case.rules]
        return InFlight(output, sampled, set[int]().union(*(row.written(sizes) for row in rows)))

    def _row(self, tracked: Tracked, start: int, stop: int) -> StepRow:
        request_id = tracked.request.request_id
        tables = self.manager.get_block_ids(request_id)
        states = self.view.state_blocks(request_id, start)
        fresh = self.view.fresh_blocks(tables, states, tracked.tables, tracked.states, start)
        if self.tier is not None:
            # A block that the brought tokens end in came as a whole.
            brought = self.tier.take_brought(request_id)
            fresh = [block for block in fresh if block not in brought]
        self.shadow.poison(fresh)
        tracked.tables, tracked.states = tables, states
        return StepRow(tables, tracked.prefixes, start, stop, states)

    def _settle(self) -> None:
        output, of_rows, _ = self.in_flight.pop(0)
        sampled = [of_rows[index] for index in output.sampling.tolist()]
        if output.num_drafts is None:
            result = self.scheduler.update_from_output(output, np.array(sampled, np.int32).reshape(-1))
        else:
            result = self.scheduler.update_from_output(output, sampled)
        for finished in result.finished:
            tracked = self.live.pop(finished.request.request_id)
            self.num_finished += 1
            answer = finished.request.token_ids().tolist()
            assert answer == tracked.tokens[: len(answer)]
            if finished.reason == "stop":
                assert answer[-1] == END_TOKEN
            else:
                assert len(answer) == min(len(tracked.tokens) - 1, LIMIT)
            self.prompts.remember(answer)

    def check(self) -> None:
        self.manager.check_integrity()
        # Requests that ended while a step was in flight hold their blocks until it reports.
        self.holding = {key for key in self.holding | set(self.live) if self.view.holds(key)}
        self.view.check_counts(sorted(self.holding))
