"""Edits of a unit's shard in place: how many there were, and what undoes those since the last fence.

Ranks edit at their own pace, and a reader names how many edits it has made (coordination/fences.py). An owner that has
made more gives it a copy in which the later ones are undone. One edit of each parameter can be undone, so that at most
one shard is kept for it.
"""

import torch


class EditLog:
    """The edits of one unit's parameters, and what their pieces were before."""

    def __init__(self) -> None:
        self.made = 0  # since the last step
        self.fenced = 0  # how many of them come before the last fence
        self._before: dict[int, torch.Tensor] = {}  # slots edited since the last fence, in order: their pieces before

    def has(self, slot: int) -> bool:
        """Was this parameter edited since the last fence?"""
        return slot in self._before

    def begin(self, slot: int, piece: torch.Tensor) -> None:
        self._before[slot] = piece.clone()

    def undo_begin(self) -> None:
        """Forget an edit that began and has raised."""
        while len(self._before) > self.made - self.fenced:
            self._before.popitem()

    def end(self) -> None:
        self.made = self.fenced + len(self._before)

    def pass_fence(self) -> None:
        self._before = {}
        self.fenced = self.made

    def pass_step(self) -> None:
        """Forget all edits: all ranks are at a step, whatever each has edited."""
        self.made = 0
        self.pass_fence()

    def later_than(self, edits: int) -> list[tuple[int, torch.Tensor]]:
        """What undoes the edits after the first `edits`: slots with their pieces before, the last edit first."""
        return list(self._before.items())[edits - self.fenced :][::-1]
