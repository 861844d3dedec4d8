"""The choice of the requests that become a batch, and of its start: a class without I/O, which is given the
time."""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count, islice, repeat
from operator import itemgetter
from typing import Final, Generic, TypeVar

__all__ = ["FormingBatches"]

R = TypeVar("R", bound=Hashable)

_LONGEST_WAIT = 2
"""The first request of a batch waits for expected ones at most this number of times `expected_within`."""
_RECENT = 100
"""Earlier requests are no longer recent once none has been under way for this number of times
`expected_within`."""


_Waiting = tuple[int, float, int]
"""How many samples a request has, when it came, and its number. A plain tuple is made in the least time."""
_SAMPLES: Final = 0
_SINCE: Final = 1
_NUMBER: Final = 2
_SAMPLES_OF = itemgetter(_SAMPLES)


class _Group(Generic[R]):
    """Requests that can share a batch, in order: at least one. `most`: the most samples of their batches."""

    __slots__ = ("most", "requests", "samples")

    def __init__(self, most: int) -> None:
        self.requests: OrderedDict[R, _Waiting] = OrderedDict()
        self.most = most
        self.samples = 0
        """How many samples the requests have together."""

    @property
    def first(self) -> _Waiting:
        """The request that came first."""
        return next(iter(self.requests.values()))

    @property
    def lacks(self) -> int:
        """How many samples a full batch lacks, if that is more than 0."""
        return self.most - self.samples


class FormingBatches(Generic[R]):
    """Requests that wait for a batch, in groups that can share one.

    Another request is **expected** while all of these hold:

    - fewer requests are under way than were recently;
    - the latest request came less than `expected_within` ago;
    - the first request of the batch came less than twice `expected_within` ago.

    How many requests were under way **recently** is the most that were at a time, less an eighth with each
    batch that starts, and less one for each that was withdrawn; 0 once none has been under way for 100 times
    `expected_within`.

    A batch may start

    - when it is full: its size is reached, or the next request of its group does not fit;
    - when its first request has waited for `max_delay`;
    - when a device has no batch to run, and no other request is expected.

    It starts while fewer than `in_flight` batches have started and not ended. One that is full may start
    although it has to wait for a device, so that its inputs are put together meanwhile: up to one more for
    each device, and only the one whose first request has waited the longest of all.

    Of several groups, the one whose first request came first starts. Requests of one group are taken in
    order.

    A device without a batch waits for expected requests because a server gets its requests one by one. If the
    first of them started alone each time, a fast device would be idle again when the second comes, and all
    would run in batches of one. The server would be busy with batches, and its clients would wait in their
    connections, where nobody counts them. The wait is short because clients may also send one request after
    another, each soon after the last. Such requests must not wait until as many are there as once came
    together: that would never happen.

    Parameters
    ----------
    sizes
        How many samples batches may have, ascending. The last is the most.
    max_delay
        How long a request waits for others at most, in the unit of the times given. It waits longer if
        `in_flight` batches run.
    in_flight
        The most batches that may have started and not ended, without full ones that wait for a device.
    devices
        How many devices run batches.
    expected_within
        Within this time after the latest request, another one is expected, if fewer are under way than were
        recently. `BatchedModel` gives half of `max_delay`, and 1 ms at most.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        max_delay: float,
        in_flight: int,
        devices: int = 1,
        *,
        expected_within: float = 0.0,
    ) -> None:
        self._sizes = tuple(sizes)
        self._max_delay = max_delay
        self._in_flight = in_flight
        self._devices = devices
        self.most_in_flight = in_flight + devices
        """The most batches that may have started and not ended, with those that wait for a device."""
        self._expected_within = expected_within
        self._groups: dict[Hashable, _Group[R]] = {}
        self._remaining_sizes: dict[Hashable, tuple[int, ...]] = {}
        """For groups of which a size is left out: the sizes that remain."""
        self._numbers = count()
        self.arrived: list[tuple[R, Hashable, float]] = []
        """Requests of one sample that came while nothing could start because of them: each with its group and
        its time. They are counted all at once, before anything else is done or asked."""
        self.room: float = 0
        """While `in_flight` batches run: how many requests `arrived` may have before a batch may be full, and
        start. 0 while fewer run. So while `arrived` is shorter than this, whoever has a request of one sample
        may append it there, in place of a call of `add`."""
        self._latest = -math.inf
        """When the latest request came."""
        self._latest_end = -math.inf
        """When the latest batch ended."""
        self._counted = 0
        """How many requests are under way, without those in `arrived`."""
        self._requests_running = 0
        self._recent = 0
        """How many requests were under way recently: see above."""
        self.running = 0
        """How many batches have started, and not ended."""

    def __len__(self) -> int:
        """How many requests wait."""
        return self.under_way - self._requests_running

    @property
    def under_way(self) -> int:
        """How many requests wait, or are in batches that have started and not ended."""
        return self._counted + len(self.arrived)

    @property
    def samples(self) -> int:
        """How many samples the waiting requests have together."""
        if self.arrived:
            self._count_arrived()
        return sum(group.samples for group in self._groups.values())

    def sizes(self, group: Hashable) -> tuple[int, ...]:
        """How many samples batches of a group may have, ascending."""
        return self._remaining_sizes.get(group, self._sizes)

    def size_for(self, group: Hashable, samples: int) -> int | None:
        """The smallest size of a batch that holds this many samples; None if there is none."""
        sizes = self.sizes(group)
        place = bisect.bisect_left(sizes, samples)
        return sizes[place] if place < len(sizes) else None

    def add(self, request: R, group: Hashable, samples: int, now: float) -> bool:
        """Let a request wait. Its samples must fit into a batch (`size_for`).

        Returns whether `take` may give a batch because of it, or `next_at` an earlier time. If not, nothing
        needs to be asked before the time that `next_at` gave last, or before the next end of a batch, or the
        next `remove`.
        """
        arrived = self.arrived
        if samples == 1 and len(arrived) < self.room:
            arrived.append((request, group, now))
            return False
        if arrived:
            self._count_arrived()
        under_way = self._counted + 1
        if under_way == 1 and now - self._latest_end > _RECENT * self._expected_within:
            self._recent = 0
        waiting = self._groups.get(group)
        if is_first := waiting is None:
            waiting = self._groups[group] = _Group(self.sizes(group)[-1])
        waiting.requests[request] = samples, now, next(self._numbers)
        waiting.samples = waiting_samples = waiting.samples + samples
        self._counted, self._latest = under_way, now
        recent = self._recent
        if recent < under_way:
            self._recent = recent = under_way
        if self.running >= self._in_flight:
            self._set_room()
            return waiting_samples >= waiting.most and self.running < self.most_in_flight
        if is_first or waiting_samples >= waiting.most:
            return True
        return self.running < self._devices and recent == under_way

    def remove(self, request: R, group: Hashable) -> bool:
        """Remove a request that waits. Returns whether it waited: then `take` may give a full batch that came
        after it."""
        if self.arrived:
            self._count_arrived()
        waiting = self._groups.get(group)
        if waiting is None or request not in waiting.requests:
            return False
        self._forget(group, waiting, [request])
        self._counted -= 1
        self._recent -= 1  # it is not expected again
        self._set_room()
        return True

    def take(self, now: float) -> list[R] | None:
        """The requests of the next batch that may start now, which runs from then on; None if none may."""
        if self.arrived:
            self._count_arrived()
        if not self._groups or self.running >= self.most_in_flight:
            return None
        due = [group for group in self._groups if self._may_start(group, now)]
        if not due:
            return None
        group = min(due, key=self._first_number)
        if self.running >= self._in_flight and not self._may_be_ahead(group):
            return None
        self._recent = max(self._counted, self._recent * 7 // 8)
        self.running += 1
        taken = self._take_from(group)
        self._requests_running += len(taken)
        self._set_room()
        return taken

    def next_at(self) -> float | None:
        """When `take` may give a batch that it does not give now, if nothing else happens; None for never."""
        if self.running >= self._in_flight:
            return None
        if self.arrived:
            self._count_arrived()
        if not self._groups:
            return None
        since = min(group.first[_SINCE] for group in self._groups.values())
        at = since + self._max_delay
        if self.running >= self._devices:
            return at
        return min(at, since + _LONGEST_WAIT * self._expected_within, self._latest + self._expected_within)

    def end(self, requests: int, now: float) -> None:
        """Note the end of a batch. `requests`: how many it had."""
        if self.arrived:
            self._count_arrived()
        self._latest_end = now
        self.running -= 1
        self._counted -= requests
        self._requests_running -= requests
        self._set_room()

    def expect_no_more(self) -> None:
        """Let batches start from now on without a wait for expected requests."""
        self._expected_within = 0.0

    def leave_out(self, group: Hashable, size: int) -> list[R]:
        """Form no more batches of a size. Returns the requests that fit into no other, and wait no more."""
        if self.arrived:
            self._count_arrived()
        self._remaining_sizes[group] = tuple(each for each in self.sizes(group) if each != size)
        self._set_room()
        waiting = self._groups.get(group)
        if waiting is None:
            return []
        waiting.most = max(self.sizes(group), default=0)
        unfit = [
            request
            for request, each in waiting.requests.items()
            if self.size_for(group, each[_SAMPLES]) is None
        ]
        self._forget(group, waiting, unfit)
        self._counted -= len(unfit)
        self._set_room()
        return unfit

    def clear(self) -> list[R]:
        """Remove and return all requests that wait."""
        if self.arrived:
            self._count_arrived()
        requests = [request for group in self._groups.values() for request in group.requests]
        self._groups.clear()
        self._counted = self._requests_running
        self._set_room()
        return requests

    def _count_arrived(self) -> None:
        """Count the requests in `arrived`: at least one. A batch has been running since they came."""
        requests, groups, times = zip(*self.arrived, strict=True)
        if groups.count(groups[0]) == len(groups):  # nearly always; so Python runs no code for each of them
            self._join(groups[0], requests, times)
        else:
            for request, group, time in zip(requests, groups, times, strict=True):
                self._join(group, [request], [time])
        self._latest = times[-1]
        self._counted += len(requests)
        self._recent = max(self._recent, self._counted)
        self.arrived.clear()
        self._set_room()

    def _join(self, group: Hashable, requests: Sequence[R], times: Sequence[float]) -> None:
        """Add requests of one sample each to a group."""
        waiting = self._groups.get(group)
        if waiting is None:
            waiting = self._groups[group] = _Group(self.sizes(group)[-1])
        # `zip` stops before it takes a number for which there is no time.
        ways = zip(repeat(1), times, self._numbers, strict=False)
        waiting.requests.update(zip(requests, ways, strict=False))
        waiting.samples += len(requests)

    def _set_room(self) -> None:
        """Note what `add` asks before it counts requests.

        While `in_flight` batches run, only a full batch of the group that came first may start. Once that is
        full, `add` has said so, and more requests change nothing.
        """
        if self.running < self._in_flight:
            self.room = 0
            return
        lacks = self._lacks() if self.running < self.most_in_flight else 0
        self.room = lacks - 1 if lacks > 0 else math.inf

    def _lacks(self) -> int:
        """How many samples a full batch of the group that came first lacks; 1 if that is not known."""
        if not self._groups:  # the next group may lack a size
            return 1 if self._remaining_sizes else self._sizes[-1]
        groups = self._groups
        return groups[next(iter(groups)) if len(groups) == 1 else min(groups, key=self._first_number)].lacks

    def _first_number(self, group: Hashable) -> int:
        """The number of the first request of a group. It is smaller than those of all later ones."""
        return self._groups[group].first[_NUMBER]

    def _is_full(self, group: Hashable) -> bool:
        return self._groups[group].lacks <= 0

    def _may_start(self, group: Hashable, now: float) -> bool:
        since = self._groups[group].first[_SINCE]
        if self._is_full(group) or now >= since + self._max_delay:
            return True
        return self.running < self._devices and not self._is_another_expected(since, now)

    def _is_another_expected(self, since: float, now: float) -> bool:
        """Whether another request is expected for a batch whose first request came at `since`."""
        may_wait = (
            now < self._latest + self._expected_within and now < since + _LONGEST_WAIT * self._expected_within
        )
        return may_wait and self._counted < self._recent

    def _may_be_ahead(self, group: Hashable) -> bool:
        """Whether a group's batch may start before a device is free: only if no request that waits came
        earlier."""
        return self._is_full(group) and group == min(self._groups, key=self._first_number)

    def _take_from(self, group: Hashable) -> list[R]:
        """Take the requests of a batch from a group, in order."""
        waiting, samples = self._groups[group], 0
        if waiting.samples == len(waiting.requests):  # one each: nearly always
            taken = [*islice(waiting.requests, waiting.most)]
        else:
            taken = []
            for request, each in waiting.requests.items():
                samples += each[_SAMPLES]
                if samples > waiting.most:
                    break
                taken.append(request)
        self._forget(group, waiting, taken)
        return taken

    def _forget(self, group: Hashable, waiting: _Group[R], requests: Sequence[R]) -> None:
        waiting.samples -= sum(map(_SAMPLES_OF, map(waiting.requests.pop, requests)))
        if not waiting.requests:
            del self._groups[group]
