"""Ranks that run programs on the real classes of the order, over an imagined network and communicator.

Whatever happens next is a *choice* of a scheduler: a program goes on, a message arrives, somebody's patience ends. What
must hold is checked as it happens: the k-th call is the same on all ranks, a page is of this version of the shards,
every part of a gradient counts once and with those of the same backward, and what is kept is bounded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from retrograde.transport.order import (
    STEP,
    Abort,
    Alarm,
    Drop,
    Effect,
    Gather,
    Issue,
    OrderMessage,
    OrderPolicy,
    Participant,
    Passed,
    Reduce,
    Role,
    Send,
    Serve,
    ServeOneSided,
    Settle,
    Sleep,
    Timer,
    Want,
    decode,
    encode,
)
from tests.order.programs import Barrier, Contribute, Event, Meet, Program, Sync, Use


class Hang(AssertionError):
    """Nothing can happen any more, and not all programs have ended."""


# ---- messages beside those of the order: reads and puts
class Read(NamedTuple):
    version: int


class Data(NamedTuple):
    version: int


class Put(NamedTuple):
    period: int
    unit: int
    backward: int
    value: int


class End(NamedTuple):
    """So many gradients were put to the receiver in this period."""

    period: int
    puts: int


class Issued(NamedTuple):
    """A call, as one rank issued it."""

    want: Want
    version: int
    period: int
    backward: int  # the how-manieth of its unit since the last boundary that the program came to
    value: int | None  # what it contributes; None if it is absent, or for a gather


class Addend(NamedTuple):
    """A part of a gradient."""

    backward: int
    rank: int
    value: int


class State(Enum):
    """What a program is doing."""

    RUN = auto()
    CALL = auto()  # waits for calls that it needs
    SYNC = auto()  # waits for all calls that were issued: of the whole device
    READS = auto()
    BARRIER = auto()  # of the user's own
    WAIT = auto()  # for the order
    SETTLE = auto()
    END = auto()
    ABORTED = auto()
    DEAD = auto()


class Choice(NamedTuple):
    """Something that may happen next."""

    kind: str
    rank: int
    source: int = 0
    timer: Timer | None = None


# In the order in which a patient scheduler lets them pass.
TIMERS = (Timer.PARTIAL, Timer.NUDGES, Timer.OFFER, Timer.SURPRISE)


Maker = Callable[[int, int, OrderPolicy, Sequence[Want]], Participant]


@dataclass
class Setting:
    """How a world is built. `group`: ranks that share a gather; the whole world if 0. `watches_all`: where the user
    waits for the whole device, calls that were issued in advance are watched as well as those that are needed."""

    policy: OrderPolicy = field(default_factory=OrderPolicy)
    runs_ahead: bool = False
    group: int = 0
    watches_all: bool = True
    guess: tuple[Want, ...] = ()
    participant: Maker = Participant


class Rank:
    """A program, and what a transport does for it."""

    def __init__(self, world: World, rank: int, program: Program) -> None:
        self.rank = rank
        self.program = program
        self.order = world.setting.participant(rank, world.size, world.setting.policy, world.setting.guess)
        self.state = State.RUN
        self.at = 0
        self.version = 0
        self.period = 0
        self.value: int | None = None
        self.came_for_step = False
        self.wanted: list[int] = []  # calls that the program needs
        self.open_calls: list[int] = []  # issued, and not known to be complete
        self.nudged: set[int] = set()
        self.since = 0  # the first call of this period
        self.kept: set[int] = set()  # calls whose pages are kept
        self.waiting = 0  # reads that have not been answered
        self.puts: Counter[int] = Counter()  # by owner
        self.backwards: Counter[int] = Counter()  # by unit, since the program came to a boundary
        self.ordinals: Counter[int] = Counter()  # by unit, in this period
        self.settle: Settle | None = None
        self.got: dict[int, list[tuple[int, Put]]] = {}
        self.ends: dict[int, dict[int, int]] = {}
        self.readers: list[tuple[int, Read]] = []
        self.cause = ""

    # ---- the program
    def ready(self, world: World) -> bool:
        match self.state:
            case State.CALL | State.SYNC:
                return all(world.done(self.rank, call) for call in self.wanted)
            case State.READS:
                return self.waiting == 0
            case State.BARRIER:
                event = self.program[self.at - 1]
                assert isinstance(event, Barrier)
                return world.barriers[event.number] == world.size
            case State.SETTLE:
                return self._is_complete(world)
        return self.state is State.RUN

    def _is_complete(self, world: World) -> bool:
        assert self.settle is not None
        if not all(world.done(self.rank, call) for call in self.open_calls):
            return False
        putters = range(world.size) if self.settle.putters is None else self.settle.putters
        ends = self.ends.get(self.period, {})
        return set(putters) <= ends.keys() and sum(ends.values()) == len(self.got.get(self.period, ()))

    def run(self, world: World) -> None:
        self.open_calls = [call for call in self.open_calls if not self._completed(world, call)]
        if self.state is State.SETTLE:
            self._rest(world)
            return
        if self.state in (State.CALL, State.SYNC):
            self.wanted = []
        self.state = State.RUN
        if self.at == len(self.program):
            self.state = State.END
            return
        event = self.program[self.at]
        self.at += 1
        self._begin(world, event)

    def _completed(self, world: World, call: int) -> bool:
        if not world.done(self.rank, call):
            return False
        self.order.completed(call)
        return True

    def _begin(self, world: World, event: Event) -> None:
        match event:
            case Barrier():
                world.barriers[event.number] += 1
                self.state = State.BARRIER
            case Sync():
                self.state = State.SYNC
                self.wanted = list(self.open_calls)
            case Meet():
                world.came[self.period] += 1
                self.came_for_step = event.boundary == STEP
                self.do(world, self.order.arrive(event.boundary, event.name))
            case Use():
                self.do(world, self.order.want(Gather(event.unit)))
            case Contribute():
                self.value = event.value
                world.expect(self, event)
                self.do(world, self.order.want(Reduce(event.unit, event.uses)))

    # ---- effects
    def do(self, world: World, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Issue():
                    self._issue(world, effect)
                case Drop():
                    self.kept.discard(effect.call.number)
                case Send():
                    world.send(self.rank, effect.to, encode(effect.message))
                    world.note(self, effect.message)
                case _:
                    self._go_on(world, effect)
        policy = world.setting.policy
        assert len(self.kept) <= policy.depth + policy.spare + 1, f"{len(self.kept)} pages are kept"

    def _go_on(self, world: World, effect: Serve | ServeOneSided | Sleep | Passed | Settle | Abort) -> None:
        """What the program has waited for, or has to wait for."""
        match effect:
            case Serve():
                self._serve(world, effect)
            case ServeOneSided():
                self._serve_one_sided(world, effect)
            case Sleep():
                self.state = State.WAIT
            case Passed():
                self.state = State.RUN
                self.backwards.clear()
                if isinstance(self.program[self.at - 1], Meet) and self.came_for_step and effect.boundary != STEP:
                    self.at -= 1  # others were not at a step: it comes again
            case Settle():
                self._settle(world, effect)
            case Abort():
                self.state = State.ABORTED
                self.cause = effect.cause

    def _issue(self, world: World, issue: Issue) -> None:
        calls = world.calls[self.rank]
        call = issue.call
        assert call.number == len(calls), "calls are numbered in the order in which they are issued"
        own = issue.role is Role.OWN and isinstance(call.want, Reduce)
        assert not own or issue.ordinal == self.ordinals[call.want.unit], "a part is numbered within its period"
        value = self.value if own else None
        calls.append(Issued(call.want, self.version, self.period, self.backwards[call.want.unit], value))
        self.open_calls.append(call.number)
        if isinstance(call.want, Gather) and issue.role is not Role.ABSENT:
            self.kept.add(call.number)
        world.issued(self.rank)
        for others in world.calls:
            if len(others) > call.number:
                there, here = others[call.number][:3], calls[-1][:3]
                assert there == here, f"mismatch of call {call.number}: {there} and {here}"

    def _serve(self, world: World, serve: Serve) -> None:
        issued = world.calls[self.rank][serve.call.number]
        assert issued.version == self.version, f"a stale {issued.want}"
        if isinstance(serve.call.want, Gather):
            assert serve.call.number in self.kept, f"the page of {serve.call.want} was thrown away"
            self.kept.discard(serve.call.number)
        world.count("collective", self.period)
        self.wanted.append(serve.call.number)
        self.state = State.RUN if world.setting.runs_ahead else State.CALL

    def _serve_one_sided(self, world: World, serve: ServeOneSided) -> None:
        world.count("one-sided", self.period)
        self.state = State.RUN
        if isinstance(serve.want, Gather):
            self.state = State.READS
            self.waiting = world.size - 1
            for peer in range(world.size):
                if peer != self.rank:
                    world.send(self.rank, peer, Read(self.version))
            return
        assert serve.ordinal == self.ordinals[serve.want.unit], "a put is numbered within its period"
        owner = serve.want.unit % world.size
        assert self.value is not None
        self.puts[owner] += 1
        world.send(self.rank, owner, Put(self.period, serve.want.unit, self.backwards[serve.want.unit], self.value))

    # ---- boundaries
    def _settle(self, world: World, settle: Settle) -> None:
        self.settle = settle
        self.state = State.SETTLE
        came = world.size if isinstance(self.program[self.at - 1], Meet) else 0
        assert world.came[self.period] == came, "ranks at a boundary and ranks on their way passed it together"
        if not came:
            parts = [parts for (period, _), parts in world.expected.items() if period == self.period]
            assert not parts, f"a detour ended in the middle of a backward: {parts}"
        assert settle.putters is None or self.rank in settle.putters or not self.puts, "puts that nobody waits for"
        if settle.putters is None or self.rank in settle.putters:
            for owner in range(world.size):
                world.send(self.rank, owner, End(self.period, self.puts[owner]))

    def _rest(self, world: World) -> None:
        assert self.settle is not None
        world.check_sums(self)
        settle, self.settle = self.settle, None
        if settle.boundary == STEP:
            assert self.came_for_step, "a step for which this rank did not come"
            self.version += 1
        self.period += 1
        self.puts.clear()
        self.ordinals.clear()
        self.got.pop(self.period - 1, None)
        self.ends.pop(self.period - 1, None)
        self.wanted = []
        self.since = len(world.calls[self.rank])
        self.state = State.WAIT
        self.do(world, self.order.rest())
        readers, self.readers = self.readers, []
        for source, read in readers:
            self.receive(world, source, read)

    # ---- the service thread
    def receive(self, world: World, source: int, message: object) -> None:
        match message:
            case bytes():
                self.do(world, self.order.message(source, decode(message)))
            case Read():
                if message.version > self.version:
                    self.readers.append((source, message))
                else:
                    world.send(self.rank, source, Data(self.version))
            case Data():
                assert message.version == self.version, "a stale read"
                self.waiting -= 1
            case Put():
                self.got.setdefault(message.period, []).append((source, message))
            case End():
                self.ends.setdefault(message.period, {})[source] = message.puts

    # ---- time
    def late_call(self, world: World) -> int | None:
        """A call that the program needs and that this rank has not nudged for."""
        if self.state is State.SYNC and not world.setting.watches_all:
            return None
        late = (call for call in self.wanted if call not in self.nudged and not world.done(self.rank, call))
        return next(late, None)

    def nudge(self, world: World) -> None:
        call = self.late_call(world)
        assert call is not None
        self.nudged.add(call)
        self.do(world, self.order.overdue(call))


class World:
    """All ranks, what is on its way between them, and what they have issued."""

    def __init__(self, programs: Sequence[Program], setting: Setting) -> None:
        self.size = len(programs)
        self.setting = setting
        self.calls: list[list[Issued]] = [[] for _ in programs]
        self.group = setting.group or self.size
        self.by_group = [0] * -(-self.size // self.group)  # calls that all ranks of a group have issued
        self.by_all = 0
        self.channels: dict[tuple[int, int], deque[object]] = {}
        self.barriers: Counter[int] = Counter()
        self.came: Counter[int] = Counter()  # by period, how many programs have come to a boundary
        self.expected: dict[tuple[int, int], list[Addend]] = {}
        self.stats: Counter[str] = Counter()
        self.per_period: dict[int, Counter[str]] = {}
        self.ranks = [Rank(self, rank, program) for rank, program in enumerate(programs)]

    def send(self, source: int, to: int, message: object) -> None:
        self.channels.setdefault((source, to), deque()).append(message)

    def count(self, what: str, period: int) -> None:
        self.stats[what] += 1
        self.per_period.setdefault(period, Counter())[what] += 1

    def note(self, rank: Rank, message: OrderMessage) -> None:
        """A message of the order: it counts for the period that it is about."""
        self.count("control", getattr(message, "period", rank.period))

    def done(self, rank: int, call: int) -> bool:
        """A gather needs the ranks of its group, a reduction all."""
        if call < self.by_all:
            return True
        by_group = self.by_group[rank // self.group]
        return call < by_group and isinstance(self.calls[rank][call].want, Gather)

    def issued(self, rank: int) -> None:
        """One more, by this rank."""
        of_group = rank // self.group
        first = of_group * self.group
        self.by_group[of_group] = min(len(calls) for calls in self.calls[first : first + self.group])
        self.by_all = min(self.by_group)

    # ---- sums
    def expect(self, rank: Rank, event: Contribute) -> None:
        rank.backwards[event.unit] += 1
        rank.ordinals[event.unit] += 1
        parts = self.expected.setdefault((rank.period, event.unit), [])
        parts.append(Addend(rank.backwards[event.unit], rank.rank, event.value))

    def check_sums(self, owner: Rank) -> None:
        """Of the period that ends: each part once, and in a reduction only those of one backward."""
        found: dict[int, list[Addend]] = {}
        for number in range(owner.since, len(self.calls[owner.rank])):
            issued = self.calls[owner.rank][number]
            if isinstance(issued.want, Gather):
                continue
            calls = [(rank, calls[number]) for rank, calls in enumerate(self.calls)]
            parts = [Addend(call.backward, rank, call.value) for rank, call in calls if call.value is not None]
            assert len({part.backward for part in parts}) <= 1, f"parts of different backwards in one sum: {parts}"
            found.setdefault(issued.want.unit, []).extend(parts)
        for source, put in owner.got.get(owner.period, ()):
            found.setdefault(put.unit, []).append(Addend(put.backward, source, put.value))
        for unit in {unit for _, unit in self.expected} | found.keys():
            if unit % self.size == owner.rank:
                expected = sorted(self.expected.get((owner.period, unit), []))
                assert sorted(found.get(unit, [])) == expected, f"a wrong sum of unit {unit} in period {owner.period}"

    # ---- choices
    def choices(self) -> list[Choice]:
        """What can happen without anybody losing patience."""
        found = [Choice("program", rank.rank) for rank in self.ranks if rank.ready(self)]
        for (source, to), queue in self.channels.items():
            if queue and self.ranks[to].state is not State.DEAD:
                found.append(Choice("message", to, source))
        return found

    def timers(self) -> list[Choice]:
        """Patience that can end, the shortest first."""
        alive = [rank for rank in self.ranks if rank.state not in (State.DEAD, State.ABORTED)]
        found = [Choice("nudge", rank.rank) for rank in alive if rank.late_call(self) is not None]
        alarms = [(alarm, rank) for rank in alive for alarm in rank.order.alarms()]
        for timer in TIMERS:
            found += [Choice("alarm", rank.rank, timer=timer) for alarm, rank in alarms if alarm.timer is timer]
        return found

    def limits(self) -> list[Choice]:
        """Waits that can only end as failures now. A roll call is over long before any of them ends a second time."""
        alive = [rank for rank in self.ranks if rank.state not in (State.DEAD, State.ABORTED)]
        alarms = [(alarm.timer, rank.rank) for rank in alive for alarm in rank.order.alarms()]
        roll_call = [Choice("alarm", rank, timer=timer) for timer, rank in alarms if timer is Timer.ROLL_CALL]
        if roll_call:
            return roll_call
        own = (State.CALL, State.SYNC, State.READS, State.SETTLE)
        found = [Choice("alarm", rank, timer=timer) for timer, rank in alarms if timer is Timer.LIMIT]
        return found + [Choice("limit", rank.rank) for rank in alive if rank.state in own]

    def do(self, choice: Choice) -> None:
        rank = self.ranks[choice.rank]
        match choice.kind:
            case "program":
                rank.run(self)
            case "message":
                message = self.channels[choice.source, choice.rank].popleft()
                rank.receive(self, choice.source, message)
            case "limit":
                rank.do(self, rank.order.limit_passed(f"at {rank.state.name}"))
            case "nudge":
                self.count("time-outs", rank.period)
                rank.nudge(self)
            case "alarm":
                if choice.timer is Timer.SURPRISE:
                    self.count("time-outs", rank.period)
                rank.do(self, rank.order.timeout(self.alarm(rank, choice.timer)))

    def alarm(self, rank: Rank, timer: Timer | None) -> Alarm:
        return next(alarm for alarm in rank.order.alarms() if alarm.timer is timer)

    def over(self) -> bool:
        return all(rank.state is State.END for rank in self.ranks)

    def check_end(self) -> None:
        if not self.over():
            raise Hang(f"hang: {[(rank.state.name, rank.at, rank.cause) for rank in self.ranks]}")
