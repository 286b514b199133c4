"""Cases from seeds. Every random choice of a case is made here."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.fuzz.recipes import ALIKE, ALONE, CHECKPOINT, KINDS, NESTED, PLAIN, REENTRANT, Act, Phase, Recipe, Touch
from tests.fuzz.touches import TOUCHES

ENDINGS = (("step", "zero"), ("step", "zero"), ("zero", "step"), ("step",), ("zeros",), ("zero",), ())
BETWEEN = ("clip value", "clip norm", "edit", "edit weights", "toggle")


def recipe(seed: int) -> Recipe:
    chance = random.Random(seed)
    blocks = tuple(chance.choice(KINDS) for _ in range(chance.randint(2, 5)))
    world, stage = chance.choice((2, 2, 2, 3, 4)), chance.choice((1, 2, 3, 3))
    alike = chance.random() < 0.5
    # Sums in torch's own order can be asked for only where ranks do the same things.
    exact = not alike or chance.random() < 0.4
    shape = Recipe(
        seed=seed,
        world=world,
        stage=stage,
        blocks=blocks,
        phases=(),
        exact=exact,
        prefetch=chance.random() < 0.7,
        resident=chance.choice((0, 0, 0, 200, 1000)),
        units=chance.choice(("blocks", "blocks", "linears", "auto")),
        hooked=exact and chance.random() < 0.2,
        in_backward=alike and not exact and chance.random() < 0.1,
        replicas=_replicas(seed, world),
        parts=random.Random(f"parts {seed}").choice((1, 1, 1, 2)),
        whole=random.Random(f"whole {seed}").choice((None, None, "matrices", "all")),
    )
    if not exact and not shape.in_backward:  # whole numbers are in double precision
        shape = replace(shape, precision=random.Random(f"precision {seed}").choice((None, "bf16", "wide")))
    phases = tuple(_phase(chance, shape, alike) for _ in range(chance.randint(1, 4)))
    return replace(shape, phases=_touched(shape, phases))


def _touched(shape: Recipe, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """By a chance of its own as well. Sums of touched gradients are exact in whole numbers only."""
    if not shape.exact or shape.in_backward:
        return phases
    chance = random.Random(f"touches {shape.seed}")
    kinds = sorted(TOUCHES)

    def some() -> tuple[Touch, ...]:
        return tuple(Touch(chance.choice(kinds), chance.randrange(1000)) for _ in range(chance.choice((0, 1, 2, 4))))

    return tuple(replace(phase, touches=some()) for phase in phases)


def _replicas(seed: int, world: int) -> int:
    """By a chance of its own: what else a seed says does not depend on it."""
    return random.Random(f"replicas {seed}").choice({2: (1, 1, 1, 2), 3: (1, 1, 1, 3), 4: (1, 2, 2, 2, 4)}[world])


def _phase(chance: random.Random, shape: Recipe, alike: bool) -> Phase:
    if shape.in_backward:
        act = Act("backward", _path(chance, shape, repeats=False))
        return Phase(((act,),) * shape.world)
    if alike:
        # What is assigned is a sum over ranks already: in floats another order than that of the other sums.
        kinds = (*ALONE, *ALIKE) if shape.exact else (*ALONE, "raise")
        acts = (_acts(chance, shape, kinds),) * shape.world
    else:
        acts = tuple(_acts(chance, shape, ALONE) for _ in range(shape.world))
    window = chance.choice((None, None, None, "coalesce", "no_sync"))
    budget = (
        chance.choice((0, 100, 300, 1000)) if window == "coalesce" and shape.exact and chance.random() < 0.5 else None
    )
    then = (*(name for name in BETWEEN if chance.random() < 0.15), *chance.choice(ENDINGS))
    return Phase(acts, window, budget, then)


def _acts(chance: random.Random, shape: Recipe, kinds: tuple[str, ...]) -> tuple[Act, ...]:
    return tuple(_act(chance, shape, chance.choice(kinds)) for _ in range(chance.randint(0, 3)))


def _act(chance: random.Random, shape: Recipe, kind: str) -> Act:
    path = _path(chance, shape, repeats=shape.exact)
    remats = [PLAIN, PLAIN, CHECKPOINT]
    if kind not in ("penalty", "inputs", "input gradient", "raise", "assign") and _nests(shape, path):
        remats += [remat for remat in NESTED if (kind, remat) != ("evaluate", REENTRANT)]  # of which torch warns
    return Act(kind, path, chance.choice(remats), chance.randrange(len(path)))


def _nests(shape: Recipe, path: tuple[int, ...]) -> bool:
    """In floats a parameter must not get gradients from a backward and from the one around it: torch adds those of the
    outer one first, the engine last."""
    return shape.exact or shape.blocks.count("tied") < 2


def _path(chance: random.Random, shape: Recipe, repeats: bool) -> tuple[int, ...]:
    count = len(shape.blocks)
    if repeats and chance.random() < 0.3:
        return tuple(chance.randrange(count) for _ in range(chance.randint(1, count + 1)))
    path = sorted(chance.sample(range(count), chance.randint(1, count)))
    return tuple(path)
