"""The backwards that run, from the first gradient that each sends to its end, also where it ends by raising.

The rules are those of flow.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from retrograde.gradients.deliveries import Deliveries
from retrograde.gradients.gradient import Delivery, Gradient, GradientState, uses_of
from retrograde.gradients.keys import Keys, by_key
from retrograde.gradients.offers import due_offers, end_of_backward, without_withdrawn
from retrograde.gradients.reducer import Reducer
from retrograde.gradients.strategy import Strategy
from retrograde.pages import Unit
from retrograde.torch_internals import current_backward, follow_backward
from retrograde.transport import Key, Offers, Position, Reason, Transport, Use, Uses

MeetOthers = Callable[[Position], list[Position]]  # wait for every rank's next meeting; everybody's position, by rank


@dataclass(slots=True)
class Backward:
    """A backward that runs: the gradients it has sent, those of them that Pack will ask for (by unit), and the
    deliveries to make when it ends."""

    is_over: Callable[[], bool]
    sent: list[Gradient] = field(default_factory=list)
    for_pack: dict[int, Gradient] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def unsummed(self) -> list[Gradient]:
        return [gradient for gradient in self.sent if gradient.state is GradientState.SENT]


class Backwards:
    """The backwards that run, and the gradients that ended ones have sent and that nobody has added up yet.

    One thread of the user's uses an engine at a time. So a backward that is recorded here and began after the one that
    runs in the asking thread has raised. So has one that is over without having reported its end."""

    def __init__(
        self,
        transport: Transport,
        units: Sequence[Unit],
        keys: Keys,
        strategy: Strategy,
        reducer: Reducer,
        deliveries: Deliveries,
        meet: MeetOthers,
    ) -> None:
        """`units`: the engine's list, to which others may be added."""
        self.running: dict[int, Backward] = {}  # by their graph tasks
        self.orphans: list[Gradient] = []  # of backwards that have ended: they are added up at the next meeting
        self._transport = transport
        self._units = units
        self._keys = keys
        self._strategy = strategy
        self._reducer = reducer
        self._deliveries = deliveries
        self._meet = meet
        self._begun = 0  # since the last step

    # ---- a backward runs
    def current(self) -> Backward:
        """The backward that runs now. If it has just begun, it is recorded here."""
        number = current_backward()
        if number not in self.running:
            self.recover()
            self._begun += 1
            self.running[number] = Backward(follow_backward(lambda: self._close(number)))
            self._reducer.begin_backward()
        return self.running[number]

    def send(self, gradient: Gradient, uses: Uses, goes_early: bool = False) -> Gradient:
        """Launch a gradient in the backward that runs now, which does not end before the gradient has been added up."""
        gradient.went_early = goes_early
        backward = self.current()
        self._reducer.launch(gradient, self._keys.next(gradient.unit, goes_early), uses)
        backward.sent.append(gradient)
        return gradient

    def send_between(self, waited: Sequence[Gradient]) -> None:
        """Send gradients that waited, outside of a backward, at a place to which all ranks come: they go as if one
        backward had brought them."""
        for gradient in waited:
            self._reducer.launch(gradient, self._keys.next(gradient.unit), uses_of(gradient.bucket))
        if waited:
            self._keys.end_backward()
        with self._deliveries.completed():
            self._deliveries.deliver_all(delivery for gradient in waited for delivery in self._orphan(gradient))
            self._strategy.finish_sending()

    def sum_known(self, backward: Backward) -> None:
        """Add up what needs no meeting: gradients that all ranks are known to have sent, for the same uses."""
        for gradient in backward.unsummed:
            contributors = self._strategy.contributors(gradient)
            if contributors is not None:
                backward.deliveries += self._reducer.sum(gradient, contributors)

    # ---- it meets the other ranks
    def meet_at_once(self, gradient: Gradient, must_be_alike: bool) -> None:
        """Meet the other ranks until `gradient` has been added up. Fail unless every rank has sent it, and if
        `must_be_alike`, for the same uses."""
        offered = self.meet_for([gradient], self.current())
        theirs = [of_rank.get(gradient.key) for of_rank in offered.values()]
        if None in theirs or (must_be_alike and any(uses != gradient.uses for uses in theirs)):
            self._transport.fail(
                f"rank {self._transport.rank}: a backward with create_graph=True, or for module.weight itself, reduces "
                f"unit {gradient.unit.name} at once: all ranks must be there, with gradients of the same parameters; "
                f"some were not"
            )

    def meet_for(self, gradients: Sequence[Gradient], backward: Backward) -> dict[int, Offers]:
        """Meet the other ranks until these gradients have been added up.
        Returns, by rank, the offers that were due at the last meeting."""
        while True:
            offers = self._meet_at_end(backward)
            if all(gradient.state is not GradientState.SENT for gradient in gradients):
                return offers

    def _meet_at_end(self, backward: Backward) -> dict[int, Offers]:
        """Meet the other ranks once, and add up what is due. Returns, by rank, the offers that were due."""
        label = f"backward {self._begun} since the last step"
        offers = self.offers()
        ended = end_of_backward(self._keys.backward, self._needed())
        positions = self._meet(Position(Reason.BACKWARD, label, offers, {}, ended))
        backward.deliveries += self._sum_up(positions)
        self._strategy.finish_sending()
        self._transport.meeting_is_over()
        return due_offers(positions)

    def _needed(self) -> list[Key] | None:
        """The keys of gradients whose sums cannot wait for another meeting; None: all sums are needed now."""
        if not self._strategy.comes_later:
            return None
        return [gradient.key for gradient in self._unsummed() if not self._reducer.comes_later(gradient)]

    def offers(self) -> Offers:
        """This rank's offers for the next meeting: what it has sent that needs a meeting, and what it has withdrawn."""
        self.recover()
        offers = {gradient.key: gradient.uses for gradient in self._unsummed() if not self._is_known(gradient)}
        return offers | dict.fromkeys(self._strategy.withdrawn(), ())

    def _is_known(self, gradient: Gradient) -> bool:
        """Can the gradient be added up without a meeting?"""
        return self._strategy.contributors(gradient) is not None

    def _unsummed(self) -> list[Gradient]:
        of_backwards = [gradient for backward in self.running.values() for gradient in backward.unsummed]
        return of_backwards + self.orphans

    # ---- what a meeting adds up
    def sum_sent(self, positions: Sequence[Position]) -> None:
        """After a meeting for something else: add up and deliver what any rank has sent before it."""
        self._deliveries.deliver_all(self._sum_up(positions))

    def take_in_sums(self) -> None:
        """Deliver the sums of calls in which this rank brought nothing: ranks have come together, and this one is about
        to say something that depends on its gradients."""
        self._deliveries.deliver_all(self._reducer.sums_of_others())

    def _sum_up(self, positions: Sequence[Position]) -> list[Delivery]:
        """Add up all that is due at this meeting, whoever sent it. Returns what no Pack of this rank waits for."""
        offers = without_withdrawn(due_offers(positions), self._transport, self._units)
        mine = {gradient.key: gradient for gradient in self._unsummed()}
        by_rank = by_key(offers)
        deliveries = []
        for key, ranks in by_rank.items():
            gradient = mine.get(key)
            if gradient is None:
                deliveries.append(self._reducer.sum_of_others(key, ranks))
                continue
            if Use.CAPTURED in gradient.uses:
                self._check_in_time(gradient)
                self._check_same_attempt(gradient, by_rank)
            deliveries += self._reducer.sum(gradient, ranks)
        self.orphans = [gradient for gradient in self.orphans if gradient.state is GradientState.SENT]
        return self._reducer.sums_of_others() + deliveries

    def _check_in_time(self, gradient: Gradient) -> None:
        """Fail if other ranks' gradients of this unit have already been added up in this backward:
        `torch.autograd.grad` returns one sum, and they cannot be added to it any more."""
        came = [
            delivery.unit
            for backward in self.running.values()
            if gradient in backward.sent
            for delivery in backward.deliveries
        ]
        if gradient.unit in came:
            self._transport.fail(
                f"rank {self._transport.rank}: others ended this backward before unit {gradient.unit.name} came; "
                f"make graphs for torch.autograd.grad in the same thread on all ranks"
            )

    def _check_same_attempt(self, gradient: Gradient, offered: Mapping[Key, object]) -> None:
        """Fail if ranks have sent this captured gradient under keys of different attempts, since they gave up different
        backwards before it."""
        attempts = {key.attempt for key in offered if key.same_but_for_attempt(gradient.key)}
        if len(attempts) > 1:
            self._transport.fail(
                f"rank {self._transport.rank}: ranks gave up different parts of backwards before torch.autograd.grad "
                f"of unit {gradient.unit.name}, so what they send now cannot be told apart from what they gave up; "
                f"give up at the same place on all ranks, or call zero_grad() or step() on all of them in between"
            )

    # ---- it ends
    def _close(self, number: int) -> None:
        """End a backward, when autograd says so:
        meet for sums that are needed now, and deliver what no Pack has asked for."""
        backward = self.running.get(number)
        if backward is None:
            return  # it raised, and the next entry has cleaned up
        self.sum_known(backward)  # what went early to make room has no Pack that would ask for it
        needed = [gradient for gradient in backward.unsummed if not self._reducer.comes_later(gradient)]
        if needed:
            self.meet_for(needed, backward)
        self.orphans += backward.unsummed
        if backward.sent:
            self._keys.end_backward()
        del self.running[number]
        self._deliveries.deliver_all(backward.deliveries)

    # ---- or it raised
    def recover(self) -> None:
        """Clean up after backwards that raised."""
        if not self.running:
            return
        now = current_backward()
        for number in [number for number, each in self.running.items() if number > now or each.is_over()]:
            self._abandon(self.running.pop(number))

    def _abandon(self, backward: Backward) -> None:
        self._strategy.finish_sending()
        for gradient in backward.sent:
            if gradient.state is GradientState.SENT and gradient.went_early:
                backward.deliveries += self._orphan(gradient)
            elif gradient.state is GradientState.SENT:
                self._give_up(gradient)
            elif gradient.state is GradientState.SUMMED:
                gradient.deliver()
                backward.deliveries.append(Delivery(gradient.unit, gradient.own, gradient.delivered_by_pack))
        self._deliveries.deliver_all(backward.deliveries)

    def _orphan(self, gradient: Gradient) -> list[Delivery]:
        """Take a sent gradient of a backward that has ended. It counts: it is added up now, if its contributors are
        known, else at the next meeting."""
        contributors = self._strategy.contributors(gradient)
        if contributors is not None:
            return self._reducer.sum(gradient, contributors)
        self.orphans.append(gradient)
        return []

    def _give_up(self, gradient: Gradient) -> None:
        gradient.give_up()
        self._strategy.give_up(gradient)
        self._keys.give_up()

    # ---- steps
    def pass_step(self) -> None:
        """Forget what belongs to the step that ends: all ranks are at it, and everything has been added up."""
        self._begun = 0
        self._strategy.pass_step()
        self._transport.discard_parts()
