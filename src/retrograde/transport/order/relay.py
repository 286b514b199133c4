"""A rank's part in the tree: what the ranks at and below it say becomes one message to the rank above.

[Note: the tree]
Rule 11: a verdict goes up when all ranks at and below this one have said theirs; at once when it is already known what
         it comes to (surprises that differ, or a surprise beside an arrival); and, so that nobody waits for what the
         root does not know, when it has been incomplete for a while. What goes down passes here too, first in first
         out, so that what is void above is void here.
"""

from retrograde.transport.order.effects import Alarm, Timer
from retrograde.transport.order.messages import (
    Arrive,
    Close,
    Decline,
    Down,
    Go,
    Grant,
    Here,
    Invite,
    Nudge,
    Overdue,
    RankFailed,
    Surprise,
    Up,
    Withdraw,
)
from retrograde.transport.order.policy import OrderPolicy
from retrograde.transport.order.verdicts import Fold


class Relay:
    """Folds what the ranks at and below this one say.

    `hear` and `timeout` return what is to be said to the rank above."""

    def __init__(self, size: int, policy: OrderPolicy) -> None:
        """`size`: how many ranks are at and below this one."""
        self._size = size
        self._policy = policy
        self._fold = Fold(policy.most_names)
        self._period = 0
        self._closed = False
        self._turn = 0
        self._said: dict[type, Up] = {}  # what the rank above knows
        self._times_said = 0

    # ---- up
    def hear(self, source: int, message: Up) -> list[Up]:
        match message:
            case Overdue() | Here() | RankFailed():
                return [message]
            case _ if message.period != self._period:
                return []
            case Invite():
                return self._pass_on_invite(message)
            case Withdraw():
                return [message]
            case Surprise():
                if not self._closed:
                    self._fold.surprises[source] = message
            case Nudge():
                self._fold.nudges[source] = message
            case Arrive():
                self._fold.hear_arrival(source, message)
        return self._say(incomplete=False)

    def _pass_on_invite(self, message: Invite) -> list[Up]:
        if message.turn <= self._turn:
            return []
        self._turn = message.turn
        return [message]

    def _say(self, incomplete: bool) -> list[Up]:
        """The messages that the rank above does not know yet and should."""
        found: list[Up] = []
        surprise = self._surprise(incomplete)
        nudge = self._fold.nudge
        if surprise is not None:
            found.append(surprise)
        if nudge is not None and (incomplete or nudge.count >= self._size):
            found.append(nudge)
        if self._fold.arrivals and (incomplete or self._fold.present == self._size):
            arrival = self._fold.arrival
            assert arrival is not None
            found.append(arrival)
        news = [message for message in found if self._said.get(type(message)) != message]
        self._times_said += len(news)
        self._said.update((type(message), message) for message in news)
        return news

    def _surprise(self, incomplete: bool) -> Surprise | None:
        surprise = self._fold.surprise
        if surprise is None:
            return None
        if self._fold.arrivals:
            surprise = Surprise(surprise.period, surprise.count, surprise.length, None)
        known = surprise.want is None or surprise.count == self._size
        return surprise if known or incomplete else None

    # ---- down
    def pass_down(self, message: Down) -> None:
        match message:
            case Grant():
                self._fold.granted()
                self._forget(Surprise, Nudge)
            case Close():
                self._closed = True
                self._fold.closed(message.length)
                self._forget(Surprise)
            case Decline():
                self._fold.decline(message.number)
            case Go():
                self._period = message.period + 1
                self._closed = False
                self._turn = 0
                self._fold.clear()
                self._said.clear()

    def _forget(self, *kinds: type) -> None:
        for kind in kinds:
            self._said.pop(kind, None)

    # ---- time
    def alarms(self) -> list[Alarm]:
        """The alarm for a verdict that stays incomplete. Only inner nodes have one:
        what the only rank of a subtree says is complete."""
        fold = self._fold
        heard = fold.surprises or fold.nudges or fold.arrivals
        if self._size == 1 or not heard:
            return []
        if not self._has_news():
            return []
        patience = self._policy.patience
        seconds = patience.gathering if fold.nudges else patience.partial
        return [Alarm(Timer.PARTIAL, (self._period, self._times_said), seconds)]

    def _has_news(self) -> bool:
        fold = self._fold
        current = (self._surprise(incomplete=True), fold.nudge, fold.arrival)
        return any(message is not None and self._said.get(type(message)) != message for message in current)

    def timeout(self, timer: Timer) -> list[Up]:
        return self._say(incomplete=True) if timer is Timer.PARTIAL else []
