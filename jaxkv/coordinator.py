"""Asks all managers and makes their answers one: the longest prefix that every group can serve.

A length L is a hit if every group can serve exactly L (each manager says what that means for its kind).
Whatever the number of kinds, the largest such L is found by letting each manager in turn shorten the
candidate to the largest length it can serve, until all accept it: no manager ever skips a length it can
serve, so none that all can serve is passed over. Full attention goes first: it scans the prompt once, and its
answer bounds all others.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.managers import NO_PART, Finder, HitPart, Manager
from jaxkv.specs import FullAttentionSpec


class Found(NamedTuple):
    """A coordinator's answer. length: tokens of the hit. parts: by manager, the units of it.

    alone: by manager, what it could serve by itself. needs_alone: by manager, units that takes.
    pending: a longer hit is being computed in this step.
    """

    length: int
    parts: tuple[HitPart, ...]
    alone: tuple[int, ...]
    needs_alone: tuple[int, ...]
    pending: bool


class KVCacheCoordinator(ABC):
    """Finds hits over the managers of one cache. A look-up changes nothing."""

    def __init__(self, managers: Sequence[Manager]) -> None:
        self.managers = tuple(managers)

    @abstractmethod
    def find_longest_cache_hit(self, hashes: list[bytes], limit: int) -> Found:
        """The longest hit of at most `limit` tokens of a prompt with these hashes."""

    def nothing(self) -> Found:
        zeros = (0,) * len(self.managers)
        return Found(0, (NO_PART,) * len(self.managers), zeros, zeros, False)


class NoPrefixCacheCoordinator(KVCacheCoordinator):
    """Prefix caching is off, or no group takes part in it: nothing is ever found."""

    def find_longest_cache_hit(self, hashes: list[bytes], limit: int) -> Found:
        return self.nothing()


class UnitaryCoordinator(KVCacheCoordinator):
    """One manager takes part: its answer stands."""

    def __init__(self, managers: Sequence[Manager]) -> None:
        super().__init__(managers)
        self._manager = next(manager for manager in managers if manager.cacheable)

    def find_longest_cache_hit(self, hashes: list[bytes], limit: int) -> Found:
        finder = self._manager.finder(hashes)
        length = finder.longest(limit)
        found = self.nothing()
        number = self._manager.number

        def only[T](values: tuple[T, ...], value: T) -> tuple[T, ...]:
            return (*values[:number], value, *values[number + 1 :])

        return Found(
            length,
            only(found.parts, finder.part(length) if length else NO_PART),
            only(found.alone, length),
            only(found.needs_alone, finder.needs(length)),
            finder.waits,
        )


class HybridCoordinator(KVCacheCoordinator):
    """Several managers take part, of any kinds and block sizes."""

    def __init__(self, managers: Sequence[Manager]) -> None:
        super().__init__(managers)
        cacheable = [manager for manager in managers if manager.cacheable]
        self._order = sorted(cacheable, key=lambda manager: not isinstance(manager.spec, FullAttentionSpec))
        self._unit = cacheable[0].context.hash_block_size

    def find_longest_cache_hit(self, hashes: list[bytes], limit: int) -> Found:
        finders = [manager.finder(hashes) for manager in self._order]
        alone, needs = [0] * len(self.managers), [0] * len(self.managers)
        parts = [NO_PART] * len(self.managers)
        length, first_answers = self._settle(finders, limit)
        pending = True in [finder.waits for finder in finders]
        asked = limit
        for manager, finder, answer in zip(self._order, finders, first_answers, strict=True):
            if length:
                parts[manager.number] = finder.part(length)
            # One that was asked for less, because others could not serve more, may have more to tell where a
            # hash ends in between.
            best = answer if asked // self._unit == limit // self._unit else finder.longest(limit)
            asked = answer
            alone[manager.number] = best
            needs[manager.number] = finder.needs(best)
        return Found(length, tuple(parts), tuple(alone), tuple(needs), pending)

    @staticmethod
    def _settle(finders: Sequence[Finder], limit: int) -> tuple[int, list[int]]:
        """The length that all accept, and each one's first answer."""
        length = limit
        first_answers: list[int] = []
        accepted = 0
        turn = 0
        while accepted < len(finders):
            answer = finders[turn % len(finders)].longest(length)
            if turn < len(finders):
                first_answers.append(answer)
            accepted = accepted + 1 if answer == length else 1
            length = answer
            turn += 1
        return length, first_answers


def make_coordinator(managers: Sequence[Manager]) -> KVCacheCoordinator:
    """The simplest coordinator that serves these managers."""
    num_cacheable = sum(manager.cacheable for manager in managers)
    if num_cacheable == 0:
        return NoPrefixCacheCoordinator(managers)
    return UnitaryCoordinator(managers) if num_cacheable == 1 else HybridCoordinator(managers)
