"""Which rank holds which of the parameters that are to be whole (whole.py).

Owners are balanced by size over the whole model: the largest parameter first, each to the rank that has the fewest
elements so far, and among equals to the first one. All ranks find the same. The fullest rank has at most 4/3 of what it
would have if they were shared out in the best way.
"""

from collections.abc import Sequence

from retrograde.layout.units import UnitSpec


class Loads:
    """How many elements of whole parameters the owner of each shard has so far."""

    def __init__(self, shards: int) -> None:
        self.elements = [0] * shards

    def assign(self, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
        """Give each whole parameter of these units an owner.
        In the units returned, parameters of one owner lie together."""
        listed = [(unit, place) for unit, spec in enumerate(specs) if spec.whole for place in range(len(spec.params))]
        sizes = {(unit, place): specs[unit].params[place][1].numel() for unit, place in listed}
        shard_of = {each: self._least(sizes[each]) for each in sorted(listed, key=lambda each: -sizes[each])}
        found = []
        for unit, spec in enumerate(specs):
            if not spec.whole:
                found.append(spec)
                continue
            order = sorted(range(len(spec.params)), key=lambda place: shard_of[unit, place])
            params = tuple(spec.params[place] for place in order)
            found.append(spec._replace(params=params, shard_of=tuple(shard_of[unit, place] for place in order)))
        return found

    def _least(self, size: int) -> int:
        """Choose the shard for the next parameter, of so many elements."""
        shard = self.elements.index(min(self.elements))
        self.elements[shard] += size
        return shard
