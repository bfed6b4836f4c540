"""Random traffic through one KVCacheManager, each step checked against the shadow and the definition."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from jaxkv.errors import JaxkvError
from jaxkv.hits import PrefixHit
from jaxkv.request import Request
from jaxkv.scheduling.chunks import chunk_end
from tests.properties.block_view import BlockView, Tables
from tests.properties.hit_definition import Unit, longest_hit
from tests.properties.shadow import PrefixIds, Shadow, StateBlocks, StepRow
from tests.properties.workload import LIMIT, CacheCase, PromptSource


@dataclass
class Live:
    """A request and where its blocks are.

    salt: its extra hash key. tables: empty while it holds nothing. awaits: tokens that somebody else brings
    and that have not arrived. old_hit: an answer from some time ago.
    """

    request: Request
    salt: str | None
    tables: Tables = field(default_factory=list)
    states: dict[int, StateBlocks] = field(default_factory=dict)
    awaits: tuple[int, int] | None = None
    old_hit: PrefixHit | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def lost_blocks(self) -> None:
        self.request.num_computed_tokens = 0
        self.tables, self.states, self.awaits = [], {}, None


class CacheDriver:
    """Does random calls, good ones and bad ones, and checks all that must hold after each."""

    def __init__(self, case: CacheCase, seed: int) -> None:
        self.case = case
        self.rng = random.Random(seed)
        self.plan = case.plan()
        self.manager = case.manager()
        self.rules = case.rules
        self.view = BlockView(self.manager)
        self.shadow = Shadow(self.rules, case.num_blocks)
        self.prefix_ids = PrefixIds()
        self.prompts = PromptSource(self.rng)
        self.live: dict[str, Live] = {}
        self.num_requests = 0
        self.num_ops = 0
        self.num_hit_tokens = 0
        self.num_refused = 0
        self.trace: list[str] = []
        self._ops: list[tuple[Callable[[], None], int]] = [
            (self.new_request, 14),
            (self.compute, 36),
            (self.decode_many, 14),
            (self.look_up, 12),
            (self.finish, 9),
            (self.preempt, 4),
            (self.refuse, 4),
            (self.bring, 4),
            (self.reset, 1),
        ]

    def run(self, num_ops: int) -> None:
        """Does `num_ops` random operations."""
        calls, weights = zip(*self._ops, strict=True)
        for call in self.rng.choices(calls, weights, k=num_ops):
            self.trace.append(call.__name__)
            call()
            self.num_ops += 1
            self.check()

    # Operations

    def new_request(self) -> None:
        if len(self.live) >= 6:
            self.finish()
        salt = self.rng.choice([None, None, None, "tenant"])
        tokens = self.prompts.prompt(LIMIT - 8)
        request = Request(f"r{self.num_requests}", tokens, cache_salt=salt)
        self.num_requests += 1
        self.live[request.request_id] = Live(request, salt)

    def compute(self) -> None:
        """One step of a few requests: a first chunk, a later chunk or a decode token each."""
        chosen = [live for live in self.live.values() if live.request.num_tokens < LIMIT and not live.awaits]
        if not chosen:
            return
        self.manager.new_step_starts()
        rows: list[StepRow] = []
        for live in self.rng.sample(chosen, min(len(chosen), self.rng.choice([1, 1, 2, 3]))):
            row = self._schedule(live)
            if row is not None:
                rows.append(row)
        self._run(rows)

    def _run(self, rows: list[StepRow]) -> None:
        copies = self.manager.take_block_copies()
        self.shadow.copy(copies.sources, copies.targets)
        self.shadow.run_step(rows)

    def _schedule(self, live: Live) -> StepRow | None:
        request, manager = live.request, self.manager
        hit: PrefixHit | None = None
        start = request.num_computed_tokens
        if not live.tables:
            hit = self._hit_for(live)
            if hit.pending and self.rng.random() < 0.8:
                return None
            start = hit.num_tokens
        elif start == request.num_tokens:
            request.append_tokens([self.prompts.next_token()])
        budget = self.rng.choice([1, 4, 7, self.case.max_num_batched_tokens])
        keep = manager.checkpoint_positions(request, hit)
        limit = min(start + budget, request.num_tokens)
        end = chunk_end(start, limit, request.num_tokens, manager.chunk_alignment, keep)
        if not self._allocate(live, hit, end - start):
            return None
        self.num_hit_tokens += start if hit else 0
        row = self._took(live, start, end)
        request.num_computed_tokens = end
        return row

    def _hit_for(self, live: Live) -> PrefixHit:
        """A fresh look-up, or now and then one that is no longer fresh."""
        hit = self.manager.get_computed_blocks(live.request)
        if live.old_hit is not None and self.rng.random() < 0.5:
            hit, live.old_hit = live.old_hit, hit
        elif self.rng.random() < 0.2:
            live.old_hit = hit
        return hit

    def _allocate(self, live: Live, hit: PrefixHit | None, num_tokens: int, **options: int | bool) -> bool:
        """Whether the request got its room. If not, nothing has changed but what its windows let go of."""
        before = self.snapshot(but=live if live.tables else None)
        try:
            allocation = self.manager.allocate_slots(live.request, num_tokens, hit=hit, **options)  # pyright: ignore
        except JaxkvError as error:
            if "stale" not in str(error):
                raise
            assert self.snapshot() == before, "a refused hit changed something"
            live.old_hit = None
            return False
        live.old_hit = None
        if allocation is not None:
            assert self.snapshot(but=live)[1] == before[1], "an allocation changed another request's table"
            return True
        self.num_refused += 1
        if live.tables:
            live.tables = self.manager.get_block_ids(live.request_id)
        else:
            assert self.snapshot() == before, "an allocation that did not fit changed something"
        return False

    def _took(self, live: Live, start: int, end: int) -> StepRow:
        """The request got its blocks: what was newly handed out is poisoned."""
        tables = self.manager.get_block_ids(live.request_id)
        states = self.view.state_blocks(live.request_id, start)
        self.shadow.poison(self.view.fresh_blocks(tables, states, live.tables, live.states, start))
        live.tables, live.states = tables, states
        return StepRow(tables, self.prefixes(live), start, end, states)

    def bring(self) -> None:
        """Tokens computed elsewhere: blocks are opened for them, or those awaited arrive and are cached."""
        if self.view.recurrent:
            return
        awaiting = [live for live in self.live.values() if live.awaits]
        fresh = [live for live in self.live.values() if not live.tables]
        self.manager.new_step_starts()
        if awaiting:
            live = self.rng.choice(awaiting)
            assert live.awaits is not None
            start, stop = live.awaits
            self._run([StepRow(live.tables, self.prefixes(live), start, stop, {}, brought=True)])
            live.awaits = None
            self.manager.cache_blocks(live.request, stop)
        elif fresh:
            live = self.rng.choice(fresh)
            hit = self.manager.get_computed_blocks(live.request)
            most = live.request.num_tokens - 1 - hit.num_tokens
            if most > 0:
                external = self.rng.randint(1, most)
                if self._allocate(live, hit, 0, num_external_tokens=external, delay_cache_blocks=True):
                    start, stop = hit.num_tokens, hit.num_tokens + external
                    self._took(live, start, stop)
                    self._run([])
                    live.awaits = (start, stop)
                    live.request.num_computed_tokens = stop

    def decode_many(self) -> None:
        """A decode step of all requests that are done with their known tokens, in one call."""
        chosen = [
            live
            for live in self.live.values()
            if live.tables and live.request.num_computed_tokens == live.request.num_tokens < LIMIT - 1
        ]
        if not chosen:
            return
        self.manager.new_step_starts()
        for live in chosen:
            live.request.append_tokens([self.prompts.next_token()])
        rows = np.array([self.manager.row_of(live.request_id) for live in chosen], np.int32)
        after = np.array([live.request.num_tokens for live in chosen], np.int64)
        done = self.manager.allocate_decodes(rows, after).num_done
        steps = []
        for index, live in enumerate(chosen):
            if index < done:
                steps.append(self._took(live, live.request.num_tokens - 1, live.request.num_tokens))
                live.request.num_computed_tokens = live.request.num_tokens
            else:
                live.tables = self.manager.get_block_ids(live.request_id)
        self._run(steps)

    def look_up(self) -> None:
        """A look-up changes nothing and finds exactly what the definition says, with the right content."""
        live = self.rng.choice(list(self.live.values())) if self.live and self.rng.random() < 0.5 else None
        if live is None or live.tables:
            salt = self.rng.choice([None, "tenant"])
            live = Live(Request("probe", self.prompts.prompt(LIMIT - 1), cache_salt=salt), salt)
        self.manager.new_step_starts()
        before = self.snapshot()
        hit = self.manager.get_computed_blocks(live.request)
        assert self.snapshot() == before, "a look-up changed something"
        if hit.num_tokens:
            self._check_content(hit, self.prefixes(live))
        if self.case.enable_caching:
            self._check_definition(hit, live)
        else:
            assert (hit.num_tokens, hit.lost_tokens) == (0, 0)

    def _check_content(self, hit: PrefixHit, prefixes: np.ndarray) -> None:
        """The blocks of a hit hold what they stand for. A block it ends in is looked at when it is copied."""
        if hit.num_tokens % self.plan.scheduler_block_size == 0:
            self.shadow.check_attention(hit.blocks, prefixes, hit.num_tokens)
        for group in self.view.recurrent:
            self.shadow.check_state(group, hit.blocks[group][-1], prefixes, hit.num_tokens)

    def _check_definition(self, hit: PrefixHit, live: Live) -> None:
        """The hit by brute force over the contents of all blocks that the pool offers, and what limits it."""
        groups = self.case.cacheable_groups
        offered = self.view.cached_blocks()
        prefixes, num_tokens = self.prefixes(live), live.request.num_tokens
        rules = [self.rules[i] for i in groups]
        held = [self.shadow.held(i, prefixes, offered.get(i, [])) for i in groups]
        unit = Unit(self.plan.hash_block_size, self.case.match_unit is not None)
        if self.case.hash_lookahead:
            # Hashes that look ahead tell fewer prefixes apart as equal, and stand in for the block after.
            rules = [replace(rule, is_eagle=False) for rule in rules]
            assert hit.num_tokens <= longest_hit(rules, held, num_tokens, unit)
            return
        assert hit.num_tokens == longest_hit(rules, held, num_tokens, unit), "not what the definition says"
        alone = [rule.longest_alone(h, num_tokens, unit) for rule, h in zip(rules, held, strict=True)]
        assert hit.lost_tokens == max(0, max(alone) - hit.num_tokens)
        assert (hit.limited_by is None) == (hit.lost_tokens == 0)

    def finish(self) -> None:
        if self.live:
            live = self.live.pop(self.rng.choice(list(self.live)))
            self.prompts.remember(live.request.token_ids().tolist())
            self.manager.free(live.request)

    def preempt(self) -> None:
        running = [live for live in self.live.values() if live.tables]
        if running:
            live = self.rng.choice(running)
            self.manager.free(live.request)
            live.request.num_preemptions += 1
            live.lost_blocks()

    def reset(self) -> None:
        """Works only while nobody holds blocks; half the time everybody is preempted first."""
        if self.rng.random() < 0.5:
            for live in self.live.values():
                self.manager.free(live.request)
                live.lost_blocks()
        held = any(live.tables for live in self.live.values()) or bool(self.manager.copies.held())
        assert self.manager.reset_prefix_cache() is not held
        if not held:
            assert not any(self.view.cached_blocks().values())

    def refuse(self) -> None:
        """Calls that must be refused, and change nothing."""
        before = self.snapshot()
        stranger = Request("stranger", [1, 2, 3])
        manager = self.manager
        bad: list[Callable[[], object]] = [
            lambda: manager.allocate_slots(stranger, 0),
            lambda: manager.allocate_slots(stranger, -1),
            lambda: manager.allocate_slots(stranger, LIMIT + 1),
            lambda: manager.allocate_slots(stranger, 1, num_external_tokens=-1),
            lambda: manager.row_of("nobody"),
            lambda: manager.get_block_ids("nobody"),
            lambda: manager.cache_blocks(stranger, 3),
            lambda: manager.remove_skipped_blocks(stranger, 3),
            lambda: manager.allocate_decodes(np.array([10_000]), np.array([5])),
            lambda: manager.allocate_decodes(np.array([-1]), np.array([5])),
        ]
        call = self.rng.choice(bad)
        try:
            call()
        except JaxkvError:
            pass
        else:
            raise AssertionError("a bad call was not refused")
        assert self.snapshot() == before, "a refused call changed something"

    # What must hold

    def check(self) -> None:
        """After every operation: the library's own count of blocks, and ours."""
        self.manager.check_integrity()
        for live in self.live.values():
            assert self.view.holds(live.request_id) == bool(live.tables)
        self.view.check_counts([key for key, live in self.live.items() if live.tables])

    def snapshot(self, but: Live | None = None) -> tuple[object, dict[str, Tables]]:
        """Everything that a caller can see: what is free and cached, and all tables (but of one request)."""
        cached = {group: sorted(blocks) for group, blocks in self.view.cached_blocks().items()}
        tables = {
            key: self.manager.get_block_ids(key)
            for key, live in self.live.items()
            if live.tables and live is not but
        }
        return (self.manager.num_free_blocks, cached), tables

    def prefixes(self, live: Live) -> np.ndarray:
        return self.prefix_ids.of(live.salt, live.request.token_ids().tolist())
