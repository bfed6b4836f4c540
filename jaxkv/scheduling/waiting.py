"""The order in which requests are served, and the queue of those that wait."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from jaxkv.request import Request, RequestStatus


class ServiceKey(NamedTuple):
    """Requests with smaller keys are served first and preempted last. `sequence` is unique."""

    priority: int
    arrival: float
    sequence: int


class _Entry(NamedTuple):
    key: ServiceKey
    request: Request


class WaitingQueue:
    """Preempted requests first, then new ones; each part in the order of the keys."""

    def __init__(self) -> None:
        self._resumed: list[_Entry] = []
        self._new: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._resumed) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        """In the order of service."""
        for part in (self._resumed, self._new):
            for entry in part:
                yield entry.request

    def add(self, request: Request, key: ServiceKey) -> None:
        part = self._resumed if request.status is RequestStatus.PREEMPTED else self._new
        insort(part, _Entry(key, request), key=_key_of)

    def remove(self, key: ServiceKey) -> None:
        """Takes out the request with this key, which must be here."""
        for part in (self._resumed, self._new):
            index = bisect_left(part, key, key=_key_of)
            if index < len(part) and part[index].key == key:
                del part[index]
                return
        raise KeyError(key)


def _key_of(entry: _Entry) -> ServiceKey:
    return entry.key
