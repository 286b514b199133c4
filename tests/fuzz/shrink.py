"""The smallest case that still fails: leave things out as long as it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.recipes import PLAIN, Act, Phase, Recipe


def shrink(recipe: Recipe, fails: Callable[[Recipe], bool], tries: int = 200) -> Recipe:
    """Smaller cases one after the other, from the first that fails again; `tries` bounds how many are run."""
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in filter(lambda each: each.possible, candidates(recipe)):
            tries -= 1
            if fails(candidate):
                recipe, smaller = candidate, True
                break
            if tries <= 0:
                break
    return recipe


def candidates(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes with one thing less, the largest things first."""
    yield from _fewer_phases(recipe)
    yield from _fewer_ranks(recipe)
    yield from _simpler_phases(recipe)
    yield from _simpler_blocks(recipe)
    yield from _defaults(recipe)


def _fewer_phases(recipe: Recipe) -> Iterator[Recipe]:
    if len(recipe.phases) == 1:
        return
    for index in range(len(recipe.phases)):
        yield replace(recipe, phases=recipe.phases[:index] + recipe.phases[index + 1 :])


def _fewer_ranks(recipe: Recipe) -> Iterator[Recipe]:
    if recipe.world > 2:
        phases = tuple(replace(phase, acts=phase.acts[:-1]) for phase in recipe.phases)
        yield replace(recipe, world=recipe.world - 1, phases=phases, replicas=1)


def _simpler_phases(recipe: Recipe) -> Iterator[Recipe]:
    for index, phase in enumerate(recipe.phases):
        for simpler in _phases(phase, recipe.exact):
            yield replace(recipe, phases=(*recipe.phases[:index], simpler, *recipe.phases[index + 1 :]))


def _simpler_blocks(recipe: Recipe) -> Iterator[Recipe]:
    for block in range(len(recipe.blocks) - 1, -1, -1):
        if len(recipe.blocks) > 1:
            yield _without_block(recipe, block)
    for block, kind in enumerate(recipe.blocks):
        if kind != "linear":
            yield replace(recipe, blocks=(*recipe.blocks[:block], "linear", *recipe.blocks[block + 1 :]))


def _defaults(recipe: Recipe) -> Iterator[Recipe]:
    defaults: dict[str, object] = {"prefetch": False, "resident": 0, "hooked": False, "units": "blocks"}
    defaults |= {"replicas": 1, "parts": 1, "precision": None, "whole": None}
    for name, value in defaults.items():
        if getattr(recipe, name) != value:
            yield replace(recipe, **{name: value})  # type: ignore[arg-type]


def _phases(phase: Phase, diverging: bool) -> Iterator[Phase]:
    if diverging:
        for rank, acts in enumerate(phase.acts):
            for simpler in _acts(acts):
                yield replace(phase, acts=(*phase.acts[:rank], simpler, *phase.acts[rank + 1 :]))
    if phase.alike:
        for simpler in _acts(phase.acts[0]):
            yield replace(phase, acts=(simpler,) * len(phase.acts))
    if phase.window is not None:
        yield replace(phase, window=None, budget=None)
    if phase.budget is not None:
        yield replace(phase, budget=None)
    for index in range(len(phase.touches)):
        yield replace(phase, touches=phase.touches[:index] + phase.touches[index + 1 :])
    for index in range(len(phase.then)):
        yield replace(phase, then=phase.then[:index] + phase.then[index + 1 :])


def _acts(acts: tuple[Act, ...]) -> Iterator[tuple[Act, ...]]:
    for index, act in enumerate(acts):
        before, after = acts[:index], acts[index + 1 :]
        yield (*before, *after)
        for simpler in _act(act):
            yield (*before, simpler, *after)


def _act(act: Act) -> Iterator[Act]:
    if act.remat != PLAIN:
        yield replace(act, remat=PLAIN)
    for place in range(len(act.path)):
        if len(act.path) > 1 and place != act.at:
            path = act.path[:place] + act.path[place + 1 :]
            yield replace(act, path=path, at=act.at - (place < act.at))
    if act.kind not in ("backward", "raise"):
        yield replace(act, kind="backward")


def _without_block(recipe: Recipe, block: int) -> Recipe:
    """Acts go around it; those that used nothing else use the first."""

    def reduced(act: Act) -> Act:
        path = tuple(index - (index > block) for index in act.path if index != block) or (0,)
        return replace(act, path=path, at=min(act.at, len(path) - 1))

    phases = tuple(
        replace(phase, acts=tuple(tuple(map(reduced, acts)) for acts in phase.acts)) for phase in recipe.phases
    )
    return replace(recipe, blocks=recipe.blocks[:block] + recipe.blocks[block + 1 :], phases=phases)
