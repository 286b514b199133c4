"""What is decided for all ranks: rank 0's part of the order, at the root of the tree.

It never waits: it hears what comes up and says what goes down. All ranks hear what it says in the order in which it is
said. The rules are those of docs/design/order.md.
"""

from collections.abc import Sequence

from retrograde.transport.order.effects import Alarm, Timer
from retrograde.transport.order.learning import Learning
from retrograde.transport.order.messages import (
    Arrive,
    Close,
    Decline,
    Down,
    Go,
    Grant,
    Here,
    Invitation,
    Invite,
    Nudge,
    OrderFailed,
    Overdue,
    RankFailed,
    RollCall,
    Surprise,
    Up,
    Withdraw,
    shortened,
)
from retrograde.transport.order.policy import OrderPolicy
from retrograde.transport.order.verdicts import Fold, common_boundary
from retrograde.transport.order.wants import SOFT_STEP, Boundary, HardStep


class Arbiter:
    """Decides for all ranks: grants wants, closes periods, lets ranks go.

    `hear` and `timeout` return what is to be said to all ranks."""

    def __init__(self, world: int, policy: OrderPolicy) -> None:
        self._world = world
        self._policy = policy
        self._fold = Fold(policy.most_names)
        self._learning = Learning()
        self._announced: frozenset[int] = frozenset()  # the volatile units that all ranks know of
        self._period = 0
        self._steps = 0
        self._in_vain = 0  # surprises that were waited for in vain, less those that were granted
        self._closed = False
        self._floor = 0  # a length that ranks which left have reached, whatever they say when they arrive
        self._dealt_with = 0  # nudges up to this length have been dealt with
        self._invitation: Invitation | None = None  # the one that is open
        self._invitations = 0
        self._turn = 0  # of the last invitation in this period
        self._roll: _Roll | None = None
        self._failed = False

    # ---- hearing
    def hear(self, source: int, message: Up) -> list[Down]:
        if self._failed:
            return []
        match message:
            case Overdue() | Here() | RankFailed():
                return self._on_trouble(message)
            case _ if message.period != self._period:
                return []  # said before its sender heard the Go that is on its way
            case Surprise():
                return self._on_surprise(source, message)
            case Nudge():
                return self._on_nudge(source, message)
            case Arrive():
                return self._on_arrival(source, message)
            case Invite():
                return self._on_invite(message)
            case Withdraw():
                return self._decline(message.invitation)

    def _on_surprise(self, source: int, message: Surprise) -> list[Down]:
        """Hear of a surprise:
        grant what all ranks want, and close the period if they want different things (Rules 4 and 5)."""
        if self._closed:
            return []  # its Close is on its way
        self._fold.surprises[source] = message
        surprise = self._fold.surprise
        assert surprise is not None
        if surprise.want is None or self._fold.arrivals:
            return self._deny()
        if not self._is_unanimous(surprise.count):
            return []
        self._in_vain = max(0, self._in_vain - 1)
        self._dealt_with = surprise.length + 1
        self._fold.granted()
        return [Grant(self._period, surprise.length, surprise.want)]

    def _is_unanimous(self, count: int) -> bool:
        return count == self._world

    def _deny(self) -> list[Down]:
        """Close the period: not all ranks will want the same (Rule 5)."""
        return self._close(0, 0, lead=False)

    def _on_nudge(self, source: int, message: Nudge) -> list[Down]:
        """Hear of a nudge. One that was dealt with already, by a grant or by a Close, is void."""
        if message.length > self._dealt_with:
            self._fold.nudges[source] = message
        return []

    def _on_arrival(self, source: int, message: Arrive) -> list[Down]:
        """Hear of an arrival, and let all ranks go when the last has arrived (Rule 8). Where somebody has arrived,
        nobody will be surprised together with all others (Rule 5)."""
        self._fold.hear_arrival(source, message)
        found: list[Down] = []
        if self._fold.surprises and self._fold.arrivals:
            found += self._deny()
        if self._invitation is not None and not self._can_end_detours():
            found += self._decline(self._invitation.number)
        if self._fold.present == self._world:
            arrival = self._fold.arrival
            assert arrival is not None
            found.append(self._end_detour(arrival) if arrival.offers else self._go(arrival))
        return found

    # ---- closing
    def _close(self, length: int, until: int, lead: bool) -> list[Down]:
        self._closed = True
        self._fold.closed(length)
        return [Close(self._period, length, until, lead)]

    def _close_late(self) -> list[Down]:
        """Close the period because some ranks wait for others (Rule 6). The fewer leave: those who wait if they are no
        majority, else those who are behind."""
        nudge = self._fold.nudge
        if nudge is None:
            return []
        self._dealt_with = nudge.length
        self._floor = max(self._floor, nudge.until)
        return self._close(nudge.length, nudge.until, lead=self._are_fewer(nudge.count))

    def _are_fewer(self, count: int) -> bool:
        return 2 * count <= self._world

    # ---- boundaries
    def _go(self, arrival: Arrive) -> Go:
        boundary = common_boundary(arrival.places)
        self._steps += isinstance(boundary, HardStep)
        self._learn(arrival)
        together = len(arrival.places) == 1
        differ = together and (arrival.digest is None or arrival.denied)
        if together and not differ:
            self._learning.clean_period()
        return self._let_go(arrival, boundary, tally=differ)

    def _end_detour(self, arrival: Arrive) -> Go:
        """Let all ranks go from a detour (Rule 10). They have not come to a boundary of their programs, so nothing is
        learned from this period."""
        self._learn(arrival)
        return self._let_go(arrival, SOFT_STEP, tally=False)

    def _learn(self, arrival: Arrive) -> None:
        if arrival.tallies:
            self._learning.period(arrival.tallies)

    def _changed_units(self) -> tuple[int, ...] | None:
        volatile = self._learning.volatile
        if volatile == self._announced:
            return None
        self._announced = volatile
        return tuple(sorted(volatile))

    def _let_go(self, arrival: Arrive, boundary: Boundary, tally: bool) -> Go:
        length = max(arrival.length, self._floor)
        volatile = self._changed_units()
        go = Go(self._period, boundary, length, arrival.putters, volatile, tally, arrival.places)
        self._period += 1
        self._closed = False
        self._floor = 0
        self._dealt_with = 0
        self._turn = 0
        self._invitation = None
        self._fold.clear()
        return go

    # ---- detours
    def _on_invite(self, message: Invite) -> list[Down]:
        """Invite all ranks. A later turn replaces an invitation that nobody could follow."""
        if message.turn <= self._turn or not self._can_end_detours():
            return []
        over = self._decline(self._invitation.number) if self._invitation is not None else []
        self._turn = message.turn
        self._invitations += 1
        self._invitation = Invitation(self._period, self._invitations, message.want)
        return [*over, self._invitation]

    def _can_end_detours(self) -> bool:
        """Rule 10: a rank that has come to a boundary of its program waits for the others to come to theirs."""
        return not self._fold.arrived and not self._fold.is_loud()

    def _decline(self, number: int) -> list[Down]:
        if self._invitation is None or self._invitation.number != number:
            return []
        self._invitation = None
        self._fold.decline(number)
        return [Decline(self._period, number)]

    # ---- time
    def alarms(self) -> list[Alarm]:
        patience = self._policy.patience
        found = []
        if self._fold.surprises:
            seconds = patience.for_surprise(self._steps, self._in_vain)
            found.append(Alarm(Timer.SURPRISE, (self._period, self._dealt_with), seconds))
        if self._fold.nudges:
            found.append(Alarm(Timer.NUDGES, (self._period, self._dealt_with), patience.gathering))
        if self._roll is not None and not self._failed:
            found.append(Alarm(Timer.ROLL_CALL, (), patience.roll_call))
        return found

    def timeout(self, timer: Timer) -> list[Down]:
        match timer:
            case Timer.SURPRISE if self._fold.surprises:
                self._in_vain += 1
                return self._close(0, 0, lead=False)
            case Timer.NUDGES:
                return self._close_late()
            case Timer.ROLL_CALL if self._roll is not None:
                return self._fail(self._roll.conclusion(self._world))
        return []

    # ---- failure
    def _on_trouble(self, message: Overdue | Here | RankFailed) -> list[Down]:
        """Hear that a rank has failed, or has waited beyond the limit: then the roll is called (Rule 12)."""
        match message:
            case RankFailed():
                return self._fail(message.text)
            case Overdue() if self._roll is None:
                self._roll = _Roll(message)
                return [RollCall()]
            case Here() if self._roll is not None:
                self._roll.answers[message.rank] = message
                if len(self._roll.answers) == self._world:
                    return self._fail(self._roll.conclusion(self._world))
        return []

    def _fail(self, text: str) -> list[Down]:
        if self._failed:
            return []
        self._failed = True
        return [OrderFailed(shortened(text))]


class _Roll:
    """The answers to a roll call, when a rank has waited for too long."""

    MOST = 8

    def __init__(self, reason: Overdue) -> None:
        self._reason = reason
        self.answers: dict[int, Here] = {}

    def conclusion(self, world: int) -> str:
        """A text that names those who do not answer, and those who are elsewhere than the rank that waited."""
        found = [f"rank {self._reason.rank} waited beyond the limit, {self._reason.where}"]
        silent = [rank for rank in range(world) if rank not in self.answers]
        if silent:
            found.append(f"no answer comes from rank(s) {_some(silent, self.MOST)}")
        elsewhere = [here for here in self.answers.values() if here.where != self._reason.where]
        elsewhere = [here for here in elsewhere if here.rank != self._reason.rank]
        elsewhere.sort(key=lambda here: here.rank)
        found += [f"rank {here.rank} is {here.where}" for here in elsewhere[: self.MOST]]
        if len(elsewhere) > self.MOST:
            found.append(f"and {len(elsewhere) - self.MOST} more are elsewhere")
        return "; ".join(found)


def _some(ranks: Sequence[int], most: int) -> str:
    listed = ", ".join(map(str, ranks[:most]))
    return listed if len(ranks) <= most else f"{listed} and {len(ranks) - most} more"
