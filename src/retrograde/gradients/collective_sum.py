"""Sums by collectives that all ranks come to in one order (transport/order), so that it is known who has a gradient.

A want names what each parameter's gradient is for, so ranks that come to the same one have the same parameters'
gradients for the same uses. What waits until a step or the end of a window is sent there, by wants as in a backward
(`GradientFlow.send_pending`). What a meeting asks for besides, of a rank that came for something else, goes by the same
calls: the meeting has said what comes, and a rank that has nothing brings zeros, which change no sum.

There are two kinds of calls (collective_calls.py). With `exact`, in the host's memory, and for whoever sees a sum in
its backward, every rank's part comes apart (`Exchange`, with replicas `ExchangeOfSums`). Else, on a device, the backend
adds them up (`BackendSum`).

Rule 1: a rank that has strayed from the order puts its parts one by one (`OrderedSum`).
Rule 2: an exchange in which a rank was absent is given over to `OrderedSum`, with the parts that came: they are added
        up in rank order at the next meeting, when the late ones are known. Whoever has the gradient meets for it.
Rule 3: what every rank brought to a call is added up without a meeting. If a rank gives it up, all must; that is said
        at the next meeting.
Rule 4: a backend's sum does not show who was absent from it, and the host does not wait for it. It goes to `.grad` as
        it is. What the absent have put comes on top at the next meeting, as a gradient that others brought; the sum is
        theirs, too, then (`Strategy.sums_of_others`). Whoever uses `.grad` meets before (`Strategy.comes_later`).
Rule 5: so a rank that puts does not meet at the end of its backward where nobody else does: its gradient waits.
"""

import hashlib
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from retrograde.devices import HAPPENED
from retrograde.gradients.bucket import Bucket
from retrograde.gradients.collective_calls import Attendance, CallKind
from retrograde.gradients.gradient import Gradient
from retrograde.gradients.keys import FLUSHED
from retrograde.gradients.landing import let_go_of_sum, memory_for_sum
from retrograde.gradients.strategy import Contributors, OrderedSum, SumOfOthers
from retrograde.gradients.sums import add_up, divide
from retrograde.labels import labelled
from retrograde.layout import Policy
from retrograde.pages import BufferPool, Unit
from retrograde.transport import CourtesySum, GradientWant, Key, OrderedTransport, Use, Uses, Work

MOST_IN_FLIGHT = 2  # buckets that are being sent; more are not taken from the pool
MOST_USES = 1024  # bytes that say what the parameters of a unit are used for


@dataclass(slots=True, eq=False)
class _Reduction:
    """A call that reduces one gradient: the bucket that it sends, until it has been read, and what the call brings."""

    kind: CallKind
    unit: Unit
    work: Work
    bucket: Bucket | None
    own: torch.Tensor  # where the sum for this rank's shard belongs
    brought: torch.Tensor | None  # every rank's part of the shard, or the sum, perhaps in `own`; None: it was added up
    apart: torch.Tensor | None  # what of `brought` is to be added up, or with replicas the memory of their sums
    attendance: Attendance


class CollectiveSum:
    """Implements `Strategy` by collectives, in the order that all ranks share."""

    takes_pieces = False  # a collective takes one piece of memory
    buffers = 2  # what is sent, and what comes
    knows_contributors = True

    def __init__(
        self,
        transport: OrderedTransport,
        policy: Policy,
        pool: BufferPool,
        one_by_one: OrderedSum,
        usual: CallKind,
        seen_at_once: CallKind,
    ) -> None:
        """`one_by_one`: adds up what straying ranks put, and gradients of calls in which a rank was absent. `usual`:
        the kind of call for sums that nobody sees before the backward has ended.
        `seen_at_once`: the kind for all others."""
        self._transport = transport
        self._one_by_one = one_by_one
        self._policy = policy
        self._divisor = transport.world if policy.mean else 1
        self._pool = pool
        self._streams = pool.streams
        self._usual = usual
        self._seen_at_once = seen_at_once
        self.comes_later = usual.comes_later
        self._started: dict[Key, _Reduction] = {}
        self._unread: dict[_Reduction, None] = {}  # started calls that nobody has added up, in the order of starting
        self._sending: deque[_Reduction] = deque()
        self._given_up: dict[Key, _Reduction] = {}

    def contributors(self, gradient: Gradient) -> Contributors | None:
        """All ranks, if each has brought a part to the gradient's call; else None, and a call in which a rank was
        absent is given over to `OrderedSum` (Rule 2)."""
        reducing = self._started.get(gradient.key)
        if reducing is None:
            return None
        if not self._is_complete(reducing):
            self._set_apart(gradient, reducing)
            return None
        return dict.fromkeys(range(self._transport.world), gradient.uses)

    def _is_complete(self, reducing: _Reduction) -> bool:
        if reducing.attendance is Attendance.UNKNOWN:
            self._look_at([reducing] if self._streams.on_host else self._unknown())
        return reducing.attendance is Attendance.ALL

    def _unknown(self) -> list[_Reduction]:
        """All calls whose attendance nobody has looked at:
        on a device they are looked at together, so that the host waits once."""
        under_way = [*self._started.values(), *self._given_up.values()]
        return [reducing for reducing in under_way if reducing.attendance is Attendance.UNKNOWN]

    def _look_at(self, unknown: Sequence[_Reduction]) -> None:
        for reducing in unknown:
            self._finish(reducing)
        found = self._transport.complete([(reducing.work, _apart_in(reducing)) for reducing in unknown])
        for reducing, complete in zip(unknown, found, strict=True):
            reducing.attendance = Attendance.ALL if complete else Attendance.SOME

    def _set_apart(self, gradient: Gradient, reducing: _Reduction) -> None:
        """Give the gradient of a call in which a rank was absent over to `OrderedSum` (Rule 2)."""
        self._one_by_one.take_over(gradient, self._keep_parts(gradient.key, reducing))
        del self._started[gradient.key]
        self._give_back(reducing)

    def _keep_parts(self, key: Key, reducing: _Reduction) -> torch.Tensor:
        """Keep the parts that other ranks brought to a call until the next meeting.
        Returns this rank's own part, as the others have it."""
        parts = self._transport.present(_parts_in(reducing))
        mine = parts.pop(self._transport.rank)
        self._transport.keep(key, {rank: part.clone() for rank, part in parts.items()})
        return mine

    # ---- sending
    def launch(self, gradient: Gradient) -> None:
        before = list(self._unread)
        while len(self._sending) >= MOST_IN_FLIGHT:
            self._finish_first()
        wire = self._policy.on_the_wire(self._policy.waiting(gradient.unit.layout.dtype))
        stream = self._streams.reducing
        sent = gradient.bucket.store
        if sent.dtype != wire:
            sent = stream.empty(sent.numel(), wire)
            stream.run(lambda: sent.copy_(gradient.bucket.store))
        want = GradientWant(gradient.key, gradient.unit.name, named_uses(gradient.uses), gradient.key.turn == FLUSHED)
        seen_in_backward = gradient.seen_at_once and not want.at_meeting
        kind = self._seen_at_once if seen_in_backward else self._usual
        if not self._start(kind, want, gradient.unit, sent, gradient.own, gradient.bucket):
            self._one_by_one.launch(gradient)
        self._advance(before)

    def _start(
        self,
        kind: CallKind,
        want: GradientWant,
        unit: Unit,
        sent: torch.Tensor,
        own: torch.Tensor,
        bucket: Bucket | None,
    ) -> bool:
        """Start a call of this kind, if this rank takes part in it. Returns whether it does."""
        stream = self._streams.reducing
        straight = kind.brings_sum and sent.dtype == own.dtype
        with labelled("reduction of", unit.name):
            if straight:
                brought, free = own, HAPPENED
            else:
                brought, free = self._pool.take(kind.numel(unit), sent.dtype)
            stream.wait(free)
            started = kind.start(want, unit, sent, brought)
        if started is None:
            if not straight:
                self._pool.give(brought, free)
            return False
        reducing = _Reduction(kind, unit, started.work, bucket, own, brought, started.apart, kind.attendance(want))
        self._started[want.key] = reducing
        self._unread[reducing] = None
        self._sending.append(reducing)
        return True

    def _finish_first(self) -> None:
        reducing = self._sending.popleft()
        stream = self._streams.reducing
        reducing.work.wait(stream)
        if reducing.bucket is not None:
            reducing.bucket.release(stream.record())
            reducing.bucket = None

    def _finish(self, reducing: _Reduction) -> None:
        while reducing in self._sending:
            self._finish_first()

    def _give_back(self, reducing: _Reduction) -> None:
        """Give the memory of a call back to the pool: nobody reads what it brought any more."""
        self._unread.pop(reducing, None)
        self._finish(reducing)
        brought, reducing.brought = reducing.brought, None
        reducing.apart = None
        if brought is not None and brought is not reducing.own:
            self._pool.give(brought, self._streams.reducing.record())

    def _advance(self, under_way: Sequence[_Reduction]) -> None:
        """Add up the calls that are done, in the host's memory: else the parts of all units would be held till the end
        of the backward. On a device this does nothing, since the host would have to wait."""
        if not self._streams.on_host:
            return
        for reducing in under_way:
            if not reducing.work.done():
                return  # those behind it were sent later
            if self._is_complete(reducing):
                self._add_up(reducing)

    def finish_sending(self) -> None:
        """Give back the memory of what has been sent. On an accelerator the host waits for nothing: the memory is free
        when the stream has come to it."""
        self._one_by_one.finish_sending()
        while self._sending and (not self._streams.on_host or self._sending[0].work.done()):
            self._finish_first()

    # ---- sums
    def total(self, gradient: Gradient, offers: Contributors) -> torch.Tensor:
        if gradient.key not in self._started:
            return self._one_by_one.total(gradient, offers)
        return self._total(gradient.key)

    def total_of_others(self, unit: Unit, key: Key, offers: Contributors) -> torch.Tensor:
        if key.turn != FLUSHED:
            return self._one_by_one.total_of_others(unit, key, offers)
        stream = self._streams.reducing
        own = memory_for_sum(unit, self._streams)
        wire = self._policy.on_the_wire(self._policy.waiting(unit.layout.dtype))
        nothing = stream.empty(unit.layout.padded_numel, wire)
        stream.run(nothing.zero_)
        self._start(self._usual, GradientWant(key, unit.name, b"", at_meeting=True), unit, nothing, own, None)
        return self._total(key)

    def sums_of_others(self, units: Sequence[Unit]) -> list[SumOfOthers]:
        """The sums that others' calls brought for this rank's shard while it was absent (Rule 4)."""
        return [self._sum_of_others(units[brought.key.unit], brought) for brought in self._transport.take_sums()]

    def _sum_of_others(self, unit: Unit, brought: CourtesySum) -> SumOfOthers:
        uses = read_uses(brought.uses, len(unit.leaves))
        if uses is None:
            self._transport.fail(
                f"rank {self._transport.rank}: it was absent from a reduction of unit {unit.name}, which has too many "
                f"parameters for others to say which of them they used; give shard(units=...) smaller ones, or let all "
                f"ranks use the same ones"
            )
        stream = self._streams.reducing
        own = memory_for_sum(unit, self._streams)
        with labelled("sum of gradient of", unit.name):
            add_up([[brought.total]], own, self._divisor, stream)
        self._streams.current().wait(stream.record())
        return SumOfOthers(unit, uses, own)

    def _total(self, key: Key) -> torch.Tensor:
        reducing = self._started.pop(key)
        if reducing.brought is not None:
            self._add_up(reducing)
        self._streams.current().wait(self._streams.reducing.record())
        return reducing.own

    def _add_up(self, reducing: _Reduction) -> None:
        self._finish(reducing)
        stream, own, apart = self._streams.reducing, reducing.own, _apart_in(reducing)
        with labelled("sum of gradient of", reducing.unit.name):
            if apart is own:
                divide(own, self._divisor, stream)
            else:
                add_up(reducing.kind.summands(apart, reducing.unit), own, self._divisor, stream)
        self._give_back(reducing)

    def give_up(self, gradient: Gradient) -> None:
        """Forget a gradient. Its call goes on, and the call's memory is free after it."""
        if gradient.key in self._started:
            reducing = self._given_up[gradient.key] = self._started.pop(gradient.key)
            self._unread.pop(reducing, None)
        else:
            self._one_by_one.give_up(gradient)

    def pass_step(self) -> None:
        self._one_by_one.pass_step()

    def withdrawn(self) -> Sequence[Key]:
        """The keys of gradients that this rank has given up and every rank had brought (Rule 3). If a rank was absent
        from the call, the others' parts are kept: those ranks may not have given the gradient up."""
        complete = [key for key, reducing in self._given_up.items() if self._is_complete(reducing)]
        for key, reducing in self._given_up.items():
            if key not in complete:
                self._keep_parts(key, reducing)
            self._give_back(reducing)
            let_go_of_sum(reducing.unit, self._streams)
        self._given_up.clear()
        return complete


def _parts_in(reducing: _Reduction) -> torch.Tensor:
    """The memory that holds what a call has brought, which nobody has added up."""
    assert reducing.brought is not None, f"the gradient of unit {reducing.unit.name} has been added up"
    return reducing.brought


def _apart_in(reducing: _Reduction) -> torch.Tensor:
    """The memory that holds what is to be added up of a call, which nobody has added up."""
    assert reducing.apart is not None, f"the gradient of unit {reducing.unit.name} has been added up"
    return reducing.apart


def named_uses(uses: Uses) -> bytes:
    """The uses of a unit's parameters in few bytes, for the order to compare: as they are, compressed if that takes too
    many bytes, or a digest if even that does."""
    plain = bytes(uses)
    if len(plain) <= MOST_USES:
        return plain
    packed = zlib.compress(plain)
    return packed if len(packed) <= MOST_USES else hashlib.blake2b(plain, digest_size=16).digest()


def read_uses(named: bytes, parameters: int) -> Uses | None:
    """Turn what `named_uses` made back into the uses of so many parameters; None: it is only a digest."""
    if parameters > MOST_USES:
        try:
            named = zlib.decompress(named)
        except zlib.error:
            return None
    return tuple(map(Use, named))
