"""Where prompts went on from what had been computed before: what an eviction policy learns from.

A boundary is known by the hash of its prefix, whether or not its content is still there.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum


class Place(IntEnum):
    """Of a boundary: the end of a prompt, one step of alignment below it, the end of an answer."""

    PROMPT = 0
    BELOW_PROMPT = 1
    ANSWER = 2


class Continuations:
    """Counts the boundaries that there were and the prompts that went on from them, by place.

    A prompt goes on from the last boundary that it contains, its own left out. The last `size` boundaries are
    remembered; one that is several keeps its first place.
    """

    size = 2**16

    def __init__(self) -> None:
        self._places: OrderedDict[bytes, Place] = OrderedDict()
        self._made = [0] * len(Place)
        self._continued = [0] * len(Place)

    def prompt(self, hashes: Sequence[bytes]) -> None:
        """A prompt with these hashes."""
        last = next(filter(self._places.__contains__, reversed(hashes)), None)
        if last is not None:
            self._continued[self._places[last]] += 1

    def boundary(self, prefix_hash: bytes, place: Place) -> None:
        """There is a boundary at the end of this prefix."""
        self._made[place] += 1
        self._places.setdefault(prefix_hash, place)
        if len(self._places) > self.size:
            self._places.popitem(last=False)

    def continued(self, place: Place) -> int:
        """How many prompts went on from boundaries of this place."""
        return self._continued[place]

    def rate(self, place: Place) -> float:
        """Prompts that went on for each boundary of this place; 0 where there is none."""
        return self._continued[place] / max(self._made[place], 1)
