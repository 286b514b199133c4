"""A rank in the order: its member, and its place in the tree. This is what a transport drives.

Inputs are what the program does (`want`, `arrive`, `rest`), what comes from other ranks (`message`) and what time does
(`completed`, `overdue`, `timeout`). Each returns effects, to be carried out in their order. One lock around all of
them; no effect but `Issue` and `Send` has to be carried out under it, and nobody waits while holding it.
"""

from collections.abc import Sequence

from retrograde.transport.order.arbiter import Arbiter
from retrograde.transport.order.effects import Alarm, Effect, Send, Timer
from retrograde.transport.order.member import Effects, OrderMember, Say
from retrograde.transport.order.messages import (
    Close,
    Decline,
    Down,
    Go,
    Grant,
    Invitation,
    OrderFailed,
    OrderMessage,
    RankFailed,
    RollCall,
    Up,
)
from retrograde.transport.order.policy import OrderPolicy
from retrograde.transport.order.relay import Relay
from retrograde.transport.order.tree import Tree
from retrograde.transport.order.wants import Boundary, Want

MEMBER_TIMERS = (Timer.OFFER, Timer.LIMIT)


class Participant:
    """One rank of the order. All ranks are made with equal policies and guesses."""

    def __init__(self, rank: int, world: int, policy: OrderPolicy, guess: Sequence[Want] = ()) -> None:
        self.rank = rank
        self._tree = Tree(world, policy.fan_out)
        via = self._tree.parent(rank) if rank else 0
        self.member = OrderMember(rank, via, policy, guess)
        self.above: Arbiter | Relay
        self.above = Arbiter(world, policy) if rank == 0 else Relay(self._tree.size(rank), policy)

        self.fingerprint = self.member.fingerprint()  # to be compared over ranks before the first want

    # ---- the program
    def want(self, want: Want) -> list[Effect]:
        """Say what the program wants. The effects end in Serve or ServeOneSided, now or after Sleep."""
        return self._route(self.member.want(want))

    def arrive(self, boundary: Boundary, name: str = "") -> list[Effect]:
        """Say that the program is at a boundary. The effects end in Settle, and after it those of `rest` in Passed."""
        return self._route(self.member.arrive(boundary, name))

    def rest(self) -> list[Effect]:
        """Say that the period's calls and puts are done and shards are at rest. A program that came for a step, and has
        passed a soft step, arrives again."""
        return self._route(self.member.rest())

    # ---- other ranks
    def message(self, source: int, message: OrderMessage) -> list[Effect]:
        if isinstance(message, Grant | Close | Go | Invitation | Decline | RollCall | OrderFailed):
            return self._pass_down(message)
        return self._hear(source, message)

    # ---- time
    def completed(self, call: int) -> None:
        self.member.completed(call)

    def overdue(self, call: int) -> list[Effect]:
        """Say that a call is incomplete after `Patience.nudge`:
        one for which the program waits, or on a device any that was issued."""
        return self._route(self.member.overdue(call))

    def alarms(self) -> list[Alarm]:
        return [*self.member.alarms(), *self.above.alarms()]

    def timeout(self, alarm: Alarm) -> list[Effect]:
        if alarm.timer in MEMBER_TIMERS:
            return self._route(self.member.timeout(alarm.timer))
        if isinstance(self.above, Arbiter):
            return self._broadcast(self.above.timeout(alarm.timer))
        return self._send_up(self.above.timeout(alarm.timer))

    # ---- failure
    def limit_passed(self, where: str) -> list[Effect]:
        """Say that a wait of the transport's own, for a call or for puts, has taken too long."""
        return self._route(self.member.limit_passed(where))

    def fail(self, cause: str) -> list[Effect]:
        """Say that this rank cannot go on, or has lost the connection to another."""
        return self._route(self.member.fail(cause))

    # ---- the tree
    def _hear(self, source: int, message: Up) -> list[Effect]:
        if isinstance(self.above, Arbiter):
            return self._broadcast(self.above.hear(source, message))
        return self._send_up(self.above.hear(source, message))

    def _send_up(self, messages: list[Up]) -> list[Effect]:
        return [Send(self._tree.parent(self.rank), message) for message in messages]

    def _broadcast(self, messages: list[Down]) -> list[Effect]:
        found: list[Effect] = []
        for message in messages:
            found += self._pass_down(message)
        return found

    def _pass_down(self, message: Down) -> list[Effect]:
        """Pass a verdict on, to the ranks below first: what this rank's own member says to it comes after it."""
        if isinstance(self.above, Relay):
            self.above.pass_down(message)
        told: list[Effect] = [Send(child, message) for child in self._tree.children(self.rank)]
        return told + self._route(self.member.message(message))

    def _route(self, said: Effects) -> list[Effect]:
        """Turn what the member says into effects: what it does comes first, and its messages go into the tree."""
        effects = [each for each in said if not isinstance(each, Say)]
        for each in said:
            if isinstance(each, Say):
                effects += self._tell_below(each.message)
                effects += self._hear(self.rank, each.message)
        return effects

    def _tell_below(self, message: Up) -> list[Effect]:
        """Tell the ranks below of a failure at once: the way by rank 0 may be what has failed."""
        if not isinstance(message, RankFailed) or isinstance(self.above, Arbiter):
            return []
        return [Send(child, OrderFailed(message.text)) for child in self._tree.children(self.rank)]
