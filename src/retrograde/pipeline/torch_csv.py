"""Schedules in the CSV of torch.distributed.pipelining: a row for each rank, an action in each cell.

    0F0,0F1,,0I0,0W0,0B1
    ,1F0,1B0,1F1,1B1

torch writes compute actions as retrograde does; a cell is empty where the rank idles. Reading leaves out the actions
that torch's own lowering adds (SEND_F, UNSHARD and the like), since `lower` adds such. A pair that torch would overlap,
`(0F1;3B0)OVERLAP_F_B`, becomes its two actions one after the other.
"""

import csv
import io
import re
from collections.abc import Iterator

from retrograde.errors import ScheduleError
from retrograde.pipeline.schedule import Action, ActionKind, Schedule

_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_COMPUTE = frozenset({ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B})


def read_csv(text: str, name: str = "csv") -> Schedule:
    """Read a schedule in torch's CSV. The placement follows from the rows in which the actions of each stage are."""
    ranks = [list(_actions(row, rank)) for rank, row in enumerate(csv.reader(io.StringIO(text)))]
    while ranks and not ranks[-1]:
        ranks.pop()  # an empty line at the end is no rank
    homes: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if homes.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"row {rank}: {action} is of stage {action.stage}, which rank {homes[action.stage]} has"
                )
    if not homes:
        raise ScheduleError("the CSV of a schedule has no actions; it has a row for each rank, as in 0F0,0F1,0B0,0B1")
    missing = sorted(set(range(max(homes) + 1)) - set(homes))
    if missing:
        raise ScheduleError(f"the CSV of a schedule has no action of stage {missing[0]}; stages are 0 to {max(homes)}")
    count = 1 + max(action.microbatch or 0 for actions in ranks for action in actions)
    placement = tuple(homes[stage] for stage in range(len(homes)))
    return Schedule(name, count, placement, tuple(map(tuple, ranks)))


def _actions(row: list[str], rank: int) -> Iterator[Action]:
    for column, cell in enumerate(row):
        overlapped = _OVERLAP.fullmatch(cell.strip())
        for word in overlapped[1].split(";") if overlapped else [cell]:
            if not word.strip() or _LOWERED.fullmatch(word.strip()):
                continue
            try:
                action = Action.parse(word.strip())
            except ScheduleError as error:
                raise ScheduleError(f"row {rank}, column {column}: {error}") from None
            yield action


def write_csv(schedule: Schedule) -> str:
    """Write the compute actions of a schedule as torch's `_load_csv` reads them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in schedule.ranks:
        writer.writerow([str(action) for action in actions if action.kind in _COMPUTE])
    return text.getvalue()
