"""One rank's part of the order: what its program's next want is served by, and what it issues for the others' sake.

[Note: the member]
A member is IN, and follows W, or OUT until the next boundary: then its program is served one-sidedly, and what the
others expect of it is issued in its name, absent. It has no threads, sockets or clocks: inputs are calls, and effects
are what they return. The program and the service thread call it under one lock, and nothing in it waits.

| phase     | the program                              | ends by                       |
|-----------|------------------------------------------|-------------------------------|
| RUNNING   | computes                                 | `want`, `arrive`              |
| SURPRISED | waits for a verdict about what it wants  | Grant, Close                  |
| OFFERING  | waits at the place of an invitation      | Go, Decline                   |
| ARRIVED   | waits at a boundary                      | Go                            |
| SETTLING  | completes its gradients, steps           | `rest`                        |
| FAILED    | raises                                   |                               |
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from retrograde.transport.order.effects import (
    Abort,
    Alarm,
    Drop,
    Effect,
    Issue,
    Passed,
    Role,
    Serve,
    ServeOneSided,
    Settle,
    Sleep,
    Timer,
)
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
    MeetingPlace,
    Nudge,
    OrderFailed,
    Overdue,
    RankFailed,
    RollCall,
    Surprise,
    Tally,
    Up,
    Withdraw,
    shortened,
)
from retrograde.transport.order.policy import OrderPolicy
from retrograde.transport.order.sequence import AgreedSequence, CollectiveCall, Consumed
from retrograde.transport.order.usage import Usages
from retrograde.transport.order.wants import STEP, Boundary, Gather, Reduce, Want


class MemberPhase(Enum):
    """What this rank's program is doing, as far as the order knows."""

    RUNNING = "outside the order"
    SURPRISED = "waiting for the others to want the same"
    OFFERING = "waiting for the others to come to the same place"
    ARRIVED = "waiting for the others"
    SETTLING = "completing its gradients, or in its step"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Say:
    """Hand a message to the rank's own place in the tree (participant.py)."""

    message: Up


Effects = list[Effect | Say]
Verdict = Grant | Close | Go | Invitation | Decline


class OrderMember:
    """One rank's part of the order, see [Note: the member]. The rules are those of docs/design/order.md."""

    def __init__(self, rank: int, via: int, policy: OrderPolicy, guess: Sequence[Want]) -> None:
        """`via`: the rank through which it hears the others."""
        self.rank = rank
        self._via = via
        self._policy = policy
        self._sequence = AgreedSequence(policy, guess)
        self._phase = MemberPhase.RUNNING
        self._period = 0
        self._volatile: frozenset[int] = frozenset()
        self.detours = 0  # how often this rank has left
        self._place = MeetingPlace(rank, STEP, "")  # where the program is or was last, by name
        self._wish: Want | None = None  # what the program waits for
        self._go: Go | None = None
        self._asked: tuple[Tally, ...] = ()  # to be said at the next boundary about this period's predecessor
        self._later: list[Close | Invitation | Decline] = []  # verdicts of the next period
        self._overdue = False  # the limit has passed, and rank 0 has been told
        self._cause = ""
        self._begin_period()

    def _begin_period(self) -> None:
        self._out = False
        self._closed = False
        self._put = False
        self._spares: deque[CollectiveCall] = deque()
        self._usages = Usages()
        self._incomplete: dict[int, int] = {}  # call: the length of W at which every rank has issued it
        self._nudged = 0  # the longest such length that this rank has nudged for
        self._nudging = False  # and whether that has not been answered yet
        self._invitation: Invitation | None = None
        self._withdrawn = False
        self._detour = 0  # gathers that were one-sided because this rank is OUT
        self._turn = 0

    @property
    def out(self) -> bool:
        """Is the program served one-sidedly until the next boundary?"""
        return self._out

    @property
    def period(self) -> int:
        """How many boundaries this rank has passed."""
        return self._period

    def fingerprint(self) -> int:
        return self._sequence.fingerprint()

    # ---- the program
    def want(self, want: Want) -> Effects:
        if self._phase is MemberPhase.FAILED:
            return [Abort(self._cause)]
        self._require(MemberPhase.RUNNING)
        self._usages.note(want)
        return self._serve(want)

    def arrive(self, boundary: Boundary, name: str) -> Effects:
        """Note that the program is at a boundary, where it waits for Settle."""
        if self._phase is MemberPhase.FAILED:
            return [Abort(self._cause)]
        self._require(MemberPhase.RUNNING)
        self._place = MeetingPlace(self.rank, boundary, shortened(name))
        return self._arrive()

    def rest(self) -> Effects:
        """End a period: its calls and puts are done, and this rank's shards will not change before the next step."""
        if self._phase is MemberPhase.FAILED:
            return [Abort(self._cause)]
        self._require(MemberPhase.SETTLING)
        go, self._go = self._go, None
        assert go is not None
        if go.volatile is not None:
            now = frozenset(go.volatile)
            self._sequence.forget_units(now - self._volatile)
            self._volatile = now
        self._asked = self._usages.tallies() if go.tally else ()
        self._period += 1
        self._begin_period()
        said = self._record(self._sequence.consume(go.boundary), Role.ABSENT, Role.PREFETCH)
        said += self._resume(go.boundary)
        later, self._later = self._later, []
        for message in later:
            said += self.message(message)
        return said

    def _resume(self, boundary: Boundary) -> Effects:
        """Go on with what the program was at before the boundary."""
        wish, self._wish = self._wish, None
        self._phase = MemberPhase.RUNNING
        if wish is not None:
            self._usages.note(wish)  # it was noted in the period that has ended; here it is served
            return self._serve(wish)
        return [Passed(boundary)]

    # ---- serving a want
    def _serve(self, want: Want) -> Effects:
        """Serve a want, if it is foreseen or goes one-sidedly; else say that it is a surprise (Rules 2 and 3)."""
        self._phase = MemberPhase.RUNNING
        self._wish = None
        if self._is_invited(want):
            return self._offer(want)
        if want.unit in self._volatile:
            return self._serve_one_sided(want)
        if self._out:
            return [*self._invite(want), *self._serve_one_sided(want)]
        if self._spares and self._spares[0].want == want:
            return [Serve(self._spares.popleft())]
        said = self._drop_spares()
        if self._sequence.expected() == want:
            return said + self._grow(want)
        if self._closed:
            self._usages.deny(want)
            return [*said, *self._leave(self._sequence.horizon()), *self._serve_one_sided(want)]
        self._phase = MemberPhase.SURPRISED
        self._wish = want
        return [*said, Say(Surprise(self._period, 1, self._sequence.length, want)), Sleep()]

    def _grow(self, want: Want) -> Effects:
        consumed = self._sequence.consume(want)
        assert consumed.call is not None
        ordinal = self._usages.ordinal(want)
        return [*self._record(consumed, Role.OWN, Role.PREFETCH, ordinal), Serve(consumed.call)]

    def _serve_one_sided(self, want: Want) -> Effects:
        self._put = self._put or isinstance(want, Reduce)
        return [ServeOneSided(want, self._usages.ordinal(want))]

    # ---- growing W
    def _record(self, consumed: Consumed, role: Role, ahead: Role, ordinal: int = 0) -> Effects:
        """The effects of W's growth.

        `role`: this rank's role in the call of the entry itself; `ahead`: its role in calls in advance."""
        said: Effects = [Drop(call) for call in consumed.dropped]
        for call in consumed.issued:
            self._incomplete[call.number] = call.length
            own = call is consumed.call
            said.append(Issue(call, role, ordinal) if own else Issue(call, ahead))
        return said

    def _complete(self, length: int) -> Effects:
        """Issue what is expected up to this length of W, absent, so that nobody waits for this rank."""
        said: Effects = []
        while self._sequence.length < length:
            want = self._sequence.expected()
            if not isinstance(want, Gather | Reduce):
                return said + self.fail(f"rank {self.rank}: the order expects {want} where others went on (a bug)")
            consumed = self._sequence.consume(want)
            said += self._record(consumed, Role.ABSENT, Role.ABSENT)
            if consumed.call is not None and consumed.call not in consumed.issued:
                said.append(Drop(consumed.call))
        return said

    def _leave(self, until: int) -> Effects:
        """Be OUT until the boundary, and issue what is expected up to the length `until` (Rule 7)."""
        self._out = True
        self.detours += 1
        return [*self._drop_spares(), *self._complete(until)]

    def _keep_spares(self, gap: list[Want]) -> Effects:
        """Issue the gathers that are missing, and keep their pages: a gather that comes too early is a prefetch."""
        said: Effects = []
        for want in gap:
            consumed = self._sequence.consume(want)
            assert consumed.call is not None
            said += self._record(consumed, Role.SPARE, Role.PREFETCH)
            self._spares.append(consumed.call)
        return said

    def _drop_spares(self) -> Effects:
        said: Effects = [Drop(call) for call in self._spares]
        self._spares.clear()
        return said

    # ---- the service thread: messages
    def message(self, message: Down) -> Effects:
        if self._phase is MemberPhase.FAILED:
            return []
        if isinstance(message, OrderFailed):
            return self._abort(message.text)
        if isinstance(message, RollCall):
            return [Say(Here(self.rank, self._period, self._sequence.length, self._where()))]
        return [] if message.period < self._period else self._on_verdict(message)

    def _on_verdict(self, message: Verdict) -> Effects:
        match message:
            case Grant():
                return self._on_grant(message)
            case Go():
                return self._on_go(message)
            case _ if message.period > self._period:
                return self._defer(message)
            case Close():
                return self._on_close(message)
            case Invitation():
                self._invitation = message
                return []
            case Decline():
                return self._on_decline(message)

    def _defer(self, message: Close | Invitation | Decline) -> Effects:
        """Keep a verdict until this rank's shards are at rest. Of several of a kind the last says it all."""
        self._later = [each for each in self._later if type(each) is not type(message)]
        self._later.append(message)
        return []

    def _on_grant(self, grant: Grant) -> Effects:
        """Let W grow by what the program wants: all ranks want it here (Rule 4)."""
        here = (self._period, self._sequence.length, self._wish)
        if self._phase is not MemberPhase.SURPRISED or here != (grant.period, grant.length, grant.want):
            return self.fail(f"rank {self.rank}: {grant.want} was granted where it is {self._where()} (a bug)")
        self._nudging = False
        self._phase = MemberPhase.RUNNING
        self._wish = None
        return self._grow(grant.want)

    def _on_close(self, close: Close) -> Effects:
        """Catch up with what the others have issued, or leave (Rule 7)."""
        self._closed = True
        leads = close.lead and self._nudging
        self._nudging = False
        missing = close.length - self._sequence.length
        said: Effects = []
        if leads:
            said = self._leave(close.until)
        elif missing > 0 and close.lead and self._can_keep_up(missing):
            said = self._keep_spares(self._sequence.ahead(missing))
        elif missing > 0:
            said = self._leave(close.until)
        if self._phase is MemberPhase.SURPRISED:
            assert self._wish is not None
            if self._out:
                self._usages.deny(self._wish)
            said += self._serve(self._wish)
        return said

    def _can_keep_up(self, missing: int) -> bool:
        """Is what is missing only gathers, and few enough to keep their pages?"""
        if self._out or missing + len(self._spares) > self._policy.spare:
            return False
        gap = self._sequence.ahead(missing)
        return len(gap) == missing and all(isinstance(want, Gather) for want in gap)

    def _on_go(self, go: Go) -> Effects:
        """Complete W to the length that all ranks reach, and settle (Rule 8)."""
        if self._phase not in (MemberPhase.ARRIVED, MemberPhase.OFFERING) or go.period != self._period:
            return self.fail(f"rank {self.rank}: told to go on where it is {self._where()} (a bug)")
        said = [*self._drop_spares(), *self._complete(go.length)]
        if self._sequence.length < go.length:
            return said  # it has failed
        self._phase = MemberPhase.SETTLING
        self._go = go
        return [*said, Settle(go.boundary, go.putters, go.places)]

    # ---- boundaries
    def _arrive(self) -> Effects:
        self._phase = MemberPhase.ARRIVED
        dropped = self._drop_spares()
        return [*dropped, Say(self._presence(offers=0)), Sleep()]

    def _presence(self, offers: int) -> Arrive:
        return Arrive(
            period=self._period,
            count=1 - offers,
            offers=offers,
            invitation=self._invitation.number if self._invitation is not None else 0,
            length=self._sequence.length,
            quiet=self._usages.quiet,
            denied=self._usages.denied,
            digest=self._usages.digest(),
            putters=(self.rank,) if self._put else (),
            places=() if offers else (self._place,),
            tallies=self._asked,
        )

    # ---- detours: Rule 10
    def _invite(self, want: Want) -> Effects:
        """After many one-sided gathers, ask whether all ranks could come together where they next want this page."""
        if not isinstance(want, Gather) or not self._usages.quiet:
            return []
        self._detour += 1
        if self._detour < self._policy.soften_after << self._turn:
            return []
        self._turn += 1
        return [Say(Invite(self._period, self._turn, want))]

    def _is_invited(self, want: Want) -> bool:
        return self._invitation is not None and want == self._invitation.want

    def _offer(self, want: Want) -> Effects:
        self._phase = MemberPhase.OFFERING
        self._wish = want
        self._withdrawn = False
        return [Say(self._presence(offers=1)), Sleep()]

    def _on_decline(self, decline: Decline) -> Effects:
        if self._invitation is None or self._invitation.number != decline.number:
            return []
        self._invitation = None
        if self._phase is not MemberPhase.OFFERING:
            return []
        assert self._wish is not None
        return self._serve(self._wish)

    # ---- time
    def completed(self, number: int) -> None:
        """Note that a call is done."""
        self._incomplete.pop(number, None)

    def overdue(self, number: int) -> Effects:
        """Nudge for a call that has been incomplete for too long, and for which the program waits,
        or could (Rule 6)."""
        length = self._incomplete.get(number, 0)
        if length <= self._nudged or self._phase in (MemberPhase.SETTLING, MemberPhase.FAILED):
            return []
        self._nudged = length
        self._nudging = True
        return [Say(Nudge(self._period, 1, length, self._sequence.horizon()))]

    def alarms(self) -> list[Alarm]:
        patience = self._policy.patience
        token = (self._period, self._sequence.length, int(self._overdue))
        found = []
        if self._phase is MemberPhase.OFFERING and not self._withdrawn:
            found.append(Alarm(Timer.OFFER, token, patience.offer))
        if self._phase in (MemberPhase.SURPRISED, MemberPhase.OFFERING, MemberPhase.ARRIVED):
            seconds = patience.limit if not self._overdue else 4 * patience.roll_call
            found.append(Alarm(Timer.LIMIT, token, seconds))
        return found

    def timeout(self, timer: Timer) -> Effects:
        if timer is Timer.OFFER and self._phase is MemberPhase.OFFERING and self._invitation is not None:
            self._withdrawn = True
            return [Say(Withdraw(self._period, self._invitation.number))]
        if timer is Timer.LIMIT and self._phase is not MemberPhase.FAILED:
            return self.limit_passed(self._where())
        return []

    # ---- failure: Rule 12
    def limit_passed(self, where: str) -> Effects:
        """Act on a wait that has taken too long. The first time rank 0 is asked who is missing. The second time it did
        not say, and this rank fails."""
        if self._overdue:
            silent = "rank 0" if self._via == 0 else f"rank 0 by way of rank {self._via}"
            return self.fail(f"rank {self.rank} waited beyond the limit, {where}, and no answer comes from {silent}")
        self._overdue = True
        return [Say(Overdue(self.rank, shortened(where)))]

    def fail(self, cause: str) -> Effects:
        """Fail, and tell all ranks: this one cannot go on."""
        if self._phase is MemberPhase.FAILED:
            return []
        return [Say(RankFailed(shortened(cause))), *self._abort(cause)]

    def _abort(self, cause: str) -> Effects:
        self._phase = MemberPhase.FAILED
        self._cause = cause
        return [Abort(cause)]

    def _where(self) -> str:
        if self._phase is MemberPhase.ARRIVED:
            return f"{self._phase.value} at {self._place.boundary} ({self._place.name or self._period})"
        if self._wish is not None:
            return f"{self._phase.value}, {self._wish}, in period {self._period}"
        return f"{self._phase.value}, in period {self._period}"

    def _require(self, phase: MemberPhase) -> None:
        if self._phase is not phase:
            raise RuntimeError(f"rank {self.rank}: it is {self._where()}, and {phase.name} is expected")

    # ---- for tests
    def sizes(self) -> dict[str, int]:
        own = {"spares": len(self._spares), "later": len(self._later), "incomplete": len(self._incomplete)}
        return self._sequence.sizes() | own
