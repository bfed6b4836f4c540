"""The cases. Each builds its state once for a side and a layout, then answers rounds of timings.

Times are CPU seconds of this process, with the garbage collector off while a round runs (which favours the
side that makes more objects), so that other work on the machine disturbs them little.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from .layouts import Layout
from .side import Limits, ManagerSide, SchedulerSide, Side, Tokens

clock = time.process_time

CHUNK = 2048
LOOK_UPS = 4
"""Look-ups of one prompt in a round."""
DECODE_STEPS = 64
"""Steps timed in a round of a decode case: four whole blocks of 16 tokens, so allocation is in the mean."""


def tokens_of(seed: int, length: int) -> Tokens:
    """`length` token ids that differ from those of any other seed."""
    return np.random.default_rng(seed).integers(1, 200_000, length, dtype=np.int32)


def timed(call: Callable[..., Any], *args: Any) -> float:
    start = clock()
    call(*args)
    return clock() - start


def prefill(manager: ManagerSide, request: Any, length: int, layout: Layout) -> list[float]:
    """Computes a prompt in chunks that end where every kind can keep its state; the times of the whole
    chunks."""
    whole = CHUNK // layout.block_size * layout.block_size
    last_boundary = (length - 1) // layout.block_size * layout.block_size
    ends = sorted({*range(whole, length, whole), last_boundary, length} - {0})
    times, start = [], 0
    for end in ends:
        seconds = timed(manager.allocate, request, end - start)
        manager.settle(request, end - start)
        if end - start == whole:
            times.append(seconds)
        start = end
    return times


def blocks_for(layout: Layout, lengths: list[int], chunk: int = CHUNK) -> int:
    """A pool that holds requests of these lengths at once, and one chunk in flight."""
    in_flight = len(layout.groups) * (chunk // layout.block_size + 4)
    return 2 + in_flight + sum(layout.blocks_of(length) for length in lengths)


class Case(ABC):
    """One case on one side and layout. `figures`: the names of what a round measures, in seconds."""

    figures: ClassVar[tuple[str, ...]]

    def __init__(self, side: Side, layout: Layout) -> None:
        self.side = side
        self.layout = layout

    @abstractmethod
    def round(self, index: int) -> dict[str, float]: ...


class CachedPrompt(Case):
    """A prompt that is wholly cached comes again: the look-up, and the admission of it with 512 more
    tokens."""

    length: ClassVar[int]

    def __init__(self, side: Side, layout: Layout) -> None:
        super().__init__(side, layout)
        blocks = blocks_for(layout, [self.length, self.length])
        self.manager = side.manager(layout, Limits(num_blocks=blocks, max_model_len=self.length + 2048))
        self.prompt = tokens_of(1, self.length)
        first = self.manager.new_request("first", self.prompt)
        prefill(self.manager, first, self.length, layout)
        self.manager.free(first)
        self.hit = (self.length - 1) // layout.block_size * layout.block_size

    def look_up(self, index: int) -> float:
        """The mean over LOOK_UPS requests."""
        names = [f"look-up {index}.{i}" for i in range(LOOK_UPS)]
        requests = [self.manager.new_request(name, self.prompt) for name in names]
        seconds = sum(timed(self.manager.look_up, request) for request in requests)
        if (hit := self.manager.look_up(requests[0])) != self.hit:
            raise RuntimeError(f"{self.side.name} found {hit} of {self.hit} tokens ({self.layout.name})")
        return seconds / LOOK_UPS


class LookUp32k(CachedPrompt):
    figures = ("look-up 32k", "admission 32k + 512")
    length = 32_768

    def round(self, index: int) -> dict[str, float]:
        look_up = self.look_up(index)
        longer = np.concatenate([self.prompt[: self.hit + 1], tokens_of(1000 + index, 511)])
        request = self.manager.new_request(f"admission {index}", longer)
        num_tokens = 512 // self.layout.block_size * self.layout.block_size or len(longer) - self.hit
        admission = timed(self.manager.admit, request, num_tokens)
        self.manager.free(request)
        return {"look-up 32k": look_up, "admission 32k + 512": admission}


class LookUp128k(CachedPrompt):
    figures = ("look-up 128k",)
    length = 131_072

    def round(self, index: int) -> dict[str, float]:
        return {"look-up 128k": self.look_up(index)}


class ChunksAndFree(Case):
    """A 32k prompt with nothing cached, in chunks of 2,048 tokens, then freed. The pool is small enough that,
    after a few rounds, new blocks are taken from cached ones."""

    figures = ("chunk of 2,048", "free 32k")
    length = 32_768

    def __init__(self, side: Side, layout: Layout) -> None:
        super().__init__(side, layout)
        blocks = blocks_for(layout, [self.length, self.length])
        self.manager = side.manager(layout, Limits(num_blocks=blocks, max_model_len=self.length + 2048))
        for index in range(3):
            self.round(-1 - index)

    def round(self, index: int) -> dict[str, float]:
        request = self.manager.new_request(f"chunks {index}", tokens_of(2000 + index, self.length))
        chunks = prefill(self.manager, request, self.length, self.layout)
        free = timed(self.manager.free, request)
        return {"chunk of 2,048": float(np.median(chunks[2:])), "free 32k": free}


class ManagerDecode(Case):
    """Requests of 1,100 to 2,100 tokens decode; the mean of a step's allocation over DECODE_STEPS steps."""

    num_requests: ClassVar[int]

    def __init__(self, side: Side, layout: Layout) -> None:
        super().__init__(side, layout)
        lengths = np.random.default_rng(3).integers(1100, 2100, self.num_requests).tolist()
        blocks = blocks_for(layout, [length + 1200 for length in lengths], 2 * CHUNK)
        manager = side.manager(layout, Limits(num_blocks=blocks, max_model_len=4096))
        requests = []
        for index, length in enumerate(lengths):
            request = manager.new_request(f"decode {index}", tokens_of(3000 + index, length))
            prefill(manager, request, length, layout)
            requests.append(request)
        self.batch = manager.decode_batch(requests)
        # The first decoded token lets the window slide to the end of the prompt.
        self.batch.allocate()
        self.batch.settle()

    def round(self, index: int) -> dict[str, float]:
        seconds = 0.0
        for _ in range(DECODE_STEPS):
            seconds += timed(self.batch.allocate)
            self.batch.settle()
        return {self.figures[0]: seconds / DECODE_STEPS}


class ManagerDecode1(ManagerDecode):
    figures = ("decode step of 1, manager",)
    num_requests = 1


class ManagerDecode256(ManagerDecode):
    figures = ("decode step of 256, manager",)
    num_requests = 256


def run_step(scheduler: SchedulerSide) -> float:
    """Seconds of one step without the model."""
    seconds = timed(scheduler.schedule)
    scheduler.sample()
    return seconds + timed(scheduler.update)


class SchedulerDecode(Case):
    """The same requests through the scheduler: schedule() and update_from_output()."""

    num_requests: ClassVar[int]

    def __init__(self, side: Side, layout: Layout) -> None:
        super().__init__(side, layout)
        lengths = np.random.default_rng(3).integers(1100, 2100, self.num_requests).tolist()
        blocks = blocks_for(layout, [length + 1200 for length in lengths], 8 * CHUNK)
        limits = Limits(num_blocks=blocks, max_model_len=4096, max_num_batched_tokens=8192)
        self.scheduler = side.scheduler(layout, limits)
        for index, length in enumerate(lengths):
            self.scheduler.add(f"decode {index}", tokens_of(3000 + index, length), 1500)
        for _ in range(2 * self.num_requests + 2):
            num_tokens = self.scheduler.schedule()
            self.scheduler.sample()
            self.scheduler.update()
            if num_tokens == self.num_requests:
                return
        raise RuntimeError(f"{self.side.name} never decodes all {self.num_requests} requests at once")

    def round(self, index: int) -> dict[str, float]:
        seconds = sum(run_step(self.scheduler) for _ in range(DECODE_STEPS))
        if self.scheduler.num_unfinished != self.num_requests:
            raise RuntimeError(
                f"requests of {self.side.name} ended during the decode case: fewer rounds, please"
            )
        return {self.figures[0]: seconds / DECODE_STEPS}


class SchedulerDecode1(SchedulerDecode):
    figures = ("decode step of 1, scheduler",)
    num_requests = 1


class SchedulerDecode256(SchedulerDecode):
    figures = ("decode step of 256, scheduler",)
    num_requests = 256


class HashPrompt(Case):
    """sha256 of every block of a 32k prompt."""

    figures = ("hashing 32k",)

    def __init__(self, side: Side, layout: Layout) -> None:
        super().__init__(side, layout)
        self.prompt = tokens_of(4, 32_768)

    def round(self, index: int) -> dict[str, float]:
        return {"hashing 32k": timed(self.side.hashing(self.prompt, self.layout.block_size).hash_all)}


class Serve2000(Case):
    """2,000 requests, each one of 20 prefixes of 1,024 tokens and 32 to 256 tokens of its own, answered with
    16 to 64 tokens: from making the request to its end, without the model."""

    figures = ("2,000 requests",)

    def round(self, index: int) -> dict[str, float]:
        rng = np.random.default_rng(5 + index)
        prefixes = [tokens_of(5000 + 100 * index + i, 1024) for i in range(20)]
        work = [
            (
                f"request {i}",
                np.concatenate([prefixes[rng.integers(20)], tokens_of(6000 + i, int(rng.integers(32, 257)))]),
                int(rng.integers(16, 65)),
            )
            for i in range(2000)
        ]
        # Room for some 200 requests at a time, so that cached prefixes compete with running requests.
        blocks = blocks_for(self.layout, [1300] * 200, 4 * CHUNK)
        limits = Limits(num_blocks=blocks, max_model_len=4096, max_num_batched_tokens=8192)
        scheduler = self.side.scheduler(self.layout, limits)
        seconds = sum(timed(scheduler.add, *request) for request in work)
        while scheduler.num_unfinished:
            seconds += run_step(scheduler)
        return {"2,000 requests": seconds}


CASES: dict[str, type[Case]] = {
    "lookup32k": LookUp32k,
    "lookup128k": LookUp128k,
    "chunk": ChunksAndFree,
    "decode1": ManagerDecode1,
    "decode256": ManagerDecode256,
    "step1": SchedulerDecode1,
    "step256": SchedulerDecode256,
    "hash": HashPrompt,
    "serve": Serve2000,
}
