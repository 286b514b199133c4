"""The order with one rule left out: each must be caught, or the rule is not needed.

A mutant replaces parts of a participant by subclasses of theirs, in which a rule is missing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from retrograde.transport.order import Alarm, Effect, Gather, OrderPolicy, Participant, Role, Timer, Want
from retrograde.transport.order.arbiter import Arbiter
from retrograde.transport.order.learning import Learning
from retrograde.transport.order.member import Effects, OrderMember
from retrograde.transport.order.messages import Arrive, Close, Decline, Down, Go, Grant, Invitation, Surprise, Up
from retrograde.transport.order.predictor import Predictor
from retrograde.transport.order.relay import Relay
from retrograde.transport.order.sequence import AgreedSequence
from retrograde.transport.order.verdicts import Fold
from retrograde.transport.order.wants import STEP, SequenceEntry


# ---- Rule 1: calls are a function of W
class PrefetchAsOneLikes(AgreedSequence):
    coin = itertools.count()  # shared by all ranks, so that it falls differently for each

    def _to_prefetch(self) -> list[Gather]:
        return [] if next(self.coin) % 3 == 0 else super()._to_prefetch()


class KeepPagesOverSteps(AgreedSequence):
    def _ends_prefetches(self, entry: SequenceEntry) -> bool:
        return isinstance(entry, Gather)


class PeekBeyondMarks(AgreedSequence):
    def _until_mark(self) -> int:
        return 1 << 30


class NoHorizon(AgreedSequence):
    def horizon(self) -> int:
        return self.length


class LookUpAnew(Predictor):
    """What was found is not followed."""

    def append(self, entry: int, may_forget: bool = False) -> bool:
        self._following = None
        return super().append(entry, may_forget)


# ---- Rules 2 to 7: the member
class NeverNudge(OrderMember):
    def overdue(self, number: int) -> Effects:
        return []


class Rejoin(OrderMember):
    """OUT only until it fits again."""

    def _serve(self, want: Want) -> Effects:
        if self._out and self._sequence.expected() == want:
            self._out = False
        return super()._serve(want)


class SpareReductions(OrderMember):
    def _can_keep_up(self, missing: int) -> bool:
        return not self._out and missing + len(self._spares) <= self._policy.spare


class NoSpares(OrderMember):
    def _can_keep_up(self, missing: int) -> bool:
        return False


class StayIn(OrderMember):
    """Issue what others wait for and go on as if nothing had happened."""

    def _leave(self, until: int) -> Effects:
        said = super()._leave(until)
        self._out = False
        return said


class LateIsOpen(OrderMember):
    def _on_close(self, close: Close) -> Effects:
        closed = self._closed
        said = super()._on_close(close)
        self._closed = closed or close.length == 0
        return said


class StayBehind(OrderMember):
    """W is not completed when all have arrived."""

    def _on_go(self, go: Go) -> Effects:
        return super()._on_go(msgspec.structs.replace(go, length=0))


class NeverDefer(OrderMember):
    def _defer(self, message: Close | Invitation | Decline) -> Effects:
        return self._on_close(message) if isinstance(message, Close) else []


class SilentPuts(OrderMember):
    def _presence(self, offers: int) -> Arrive:
        return msgspec.structs.replace(super()._presence(offers), putters=())


class NeverWithdraw(OrderMember):
    def alarms(self) -> list[Alarm]:
        return [alarm for alarm in super().alarms() if alarm.timer is not Timer.OFFER]


class NeverInvite(OrderMember):
    def _invite(self, want: Want) -> Effects:
        return []


class AbsentPrefetches(OrderMember):
    """What a spare's call prefetches is thrown away."""

    def _keep_spares(self, gap: list[Want]) -> Effects:
        said: Effects = []
        for want in gap:
            consumed = self._sequence.consume(want)
            assert consumed.call is not None
            said += self._record(consumed, Role.SPARE, Role.ABSENT)
            self._spares.append(consumed.call)
        return said


# ---- Rules 4 to 8: the arbiter
class NoPatience(Arbiter):
    def alarms(self) -> list[Alarm]:
        return [alarm for alarm in super().alarms() if alarm.timer is not Timer.SURPRISE]


class GrantByMost(Arbiter):
    def _is_unanimous(self, count: int) -> bool:
        return count >= self._world - 1


class LateIsOpenForAll(Arbiter):
    def _close(self, length: int, until: int, lead: bool) -> list[Down]:
        closed = self._closed
        found = super()._close(length, until, lead)
        self._closed = closed or length == 0
        return found


class NoFloor(Arbiter):
    def _close_late(self) -> list[Down]:
        found = super()._close_late()
        self._floor = 0
        return found


class SlowDenial(Arbiter):
    def _deny(self) -> list[Down]:
        return []


class NobodyLeads(Arbiter):
    def _are_fewer(self, count: int) -> bool:
        return False


class GrantKeepsNudges(Arbiter):
    def _on_surprise(self, source: int, message: Surprise) -> list[Down]:
        nudges, settled = dict(self._fold.nudges), self._dealt_with
        found = super()._on_surprise(source, message)
        if any(isinstance(each, Grant) for each in found):
            self._fold.nudges, self._dealt_with = nudges, settled
        return found


class StepAlone(Arbiter):
    def _go(self, arrival: Arrive) -> Go:
        return msgspec.structs.replace(super()._go(arrival), boundary=STEP)


class EndDetoursBeforeBoundaries(Arbiter):
    def _can_end_detours(self) -> bool:
        return not self._fold.is_loud()


class EndDetoursInBackward(Fold):
    def is_loud(self) -> bool:
        return False


class KeepOffers(Fold):
    def decline(self, number: int) -> None:
        pass


# ---- Rule 9: learning
class NeverVolatile(Learning):
    volatile_at = 1 << 30


class VolatileAtOnce(Learning):
    volatile_at = 4


class BlameMost(Learning):
    def _to_blame(self, units: set[int], suspects: set[int]) -> set[int]:
        return suspects


class NoBackOff(Learning):
    def _pause(self, unit: int) -> int:
        return 8


# ---- Rule 11: the tree
class CompleteOnly(Relay):
    def alarms(self) -> list[Alarm]:
        return []


class KeepSurprises(Relay):
    """What is void above is not void here."""

    def pass_down(self, message: Down) -> None:
        if not isinstance(message, Grant):
            super().pass_down(message)


# ---- Rule 9 again, and Rule 12: failure
class KeepVolatilePast(AgreedSequence):
    def forget_units(self, units: Iterable[int]) -> None:
        pass


class NoRollCall(Arbiter):
    def alarms(self) -> list[Alarm]:
        return [alarm for alarm in super().alarms() if alarm.timer is not Timer.ROLL_CALL]


class WaitForRankZero(OrderMember):
    """However long it does not answer."""

    def limit_passed(self, where: str) -> Effects:
        return [] if self._overdue else super().limit_passed(where)


class TellAboveOnly(Participant):
    def _tell_below(self, message: Up) -> list[Effect]:
        return []


class Mutant(NamedTuple):
    name: str
    parts: Sequence[type]
    shown_by: str = ""  # a program with one feature, or FAILURES; random programs if not given
    fan_out: int = 32

    def participant(self, rank: int, world: int, policy: OrderPolicy, guess: Sequence[Want]) -> Participant:
        made = Participant(rank, world, policy, guess)
        sequence = made.member._sequence
        parts: list[object] = [made, made.member, made.above, sequence, sequence._predictor, made.above._fold]
        if isinstance(made.above, Arbiter):
            parts.append(made.above._learning)
        for mutated in self.parts:
            for part in parts:
                if type(part) is mutated.__mro__[1]:
                    part.__class__ = mutated
        return made


FAILURES = "random programs in which a rank fails"

MUTANTS = (
    Mutant("prefetch as each rank likes", [PrefetchAsOneLikes]),
    Mutant("pages are kept over steps", [KeepPagesOverSteps]),
    Mutant("predictions go beyond a cut of the past", [PeekBeyondMarks]),
    Mutant("leave without going ahead", [NoHorizon], "rank 1 skips unit 2 at step 6"),
    Mutant("an occurrence is not followed", [LookUpAnew]),
    Mutant("nobody nudges", [NeverNudge]),
    Mutant("an OUT rank joins again", [Rejoin]),
    Mutant("reductions are spare too", [SpareReductions]),
    Mutant("no spare pages", [NoSpares], "the same while others sit in a barrier"),
    Mutant("prefetches beside spares are thrown away", [AbsentPrefetches]),
    Mutant("who is late stays IN", [StayIn]),
    Mutant("grants after a late rank", [LateIsOpen, LateIsOpenForAll]),
    Mutant("W is not completed at a boundary", [StayBehind]),
    Mutant("messages of the next period at once", [NeverDefer]),
    Mutant("puts that are not told", [SilentPuts]),
    Mutant("a detour ends during a backward", [EndDetoursInBackward]),
    Mutant("a detour ends where a rank is at a boundary", [EndDetoursBeforeBoundaries]),
    Mutant("offers are not withdrawn", [NeverWithdraw]),
    Mutant("nobody invites", [NeverInvite], "an inference loop after a detour"),
    Mutant("no patience with surprises", [NoPatience]),
    Mutant("a grant by all but one", [GrantByMost]),
    Mutant("what leavers reached is forgotten", [NoFloor]),
    Mutant("surprises that differ wait", [SlowDenial], "experts that ranks use differently"),
    Mutant("those who wait never leave", [NobodyLeads], "the same while others sit in a barrier"),
    Mutant("a grant keeps nudges", [GrantKeepsNudges]),
    Mutant("a step for which not all came", [StepAlone]),
    Mutant("declined offers count", [KeepOffers]),
    Mutant("no unit is volatile", [NeverVolatile], "experts that ranks use differently"),
    Mutant("volatile at once", [VolatileAtOnce], "rank 1 skips unit 2 at step 6"),
    Mutant("most units may be blamed", [BlameMost], "rank 0 evaluates alone at steps 4, 6, 8"),
    Mutant("no back-off", [NoBackOff], "rank 1 always swaps units 2 and 3"),
    Mutant("volatile units stay in W's past", [KeepVolatilePast], "experts that ranks use differently"),
    Mutant("no end of a roll call", [NoRollCall], FAILURES),
    Mutant("rank 0 is waited for without an end", [WaitForRankZero], FAILURES),
    Mutant("ranks below are not told of a failure", [TellAboveOnly], FAILURES),
    Mutant("the tree says only what is complete", [CompleteOnly]),
    Mutant("a grant is not noted in the tree", [KeepSurprises], "GAN, two kinds of steps", fan_out=2),
)
