"""The order of collectives that ranks share without talking, unless surprised. No torch, threads, sockets or clocks.

[Note: driving the order]
A transport makes one `Participant` per rank and engine, with an equal `OrderPolicy` on all ranks, and a lock around it.
Which accesses of pages are wants must be a function of the program alone. `fingerprint` tells whether policies are
equal. Then:

| when                                             | call                          | the program goes on at         |
|--------------------------------------------------|-------------------------------|--------------------------------|
| the program needs a page                         | `want(Gather(unit))`          | `Serve(call)`, `ServeOneSided` |
| a unit's gradient is ready                       | `want(Reduce(unit, uses))`    | `Serve(call)`, `ServeOneSided` |
| an optimizer steps                               | `arrive(STEP, name)`          | `Settle`, then see below       |
| ranks meet (values, flushes, train/eval)         | `arrive(SOFT_STEP, name)`     | `Settle`, then see below       |
| calls and puts are done, and the step too        | `rest()`                      | `Passed`                       |
| a message of the order comes                     | `message(source, message)`    |                                |
| a call is done / incomplete for `Patience.nudge` | `completed(n)` / `overdue(n)` |                                |
| an alarm has stood for its seconds               | `timeout(alarm)`              |                                |
| a wait of the transport's own is too long        | `limit_passed(where)`         | `Abort`                        |
| this rank fails, a connection is lost            | `fail(cause)`                 | `Abort`                        |

Each returns effects (effects.py), to be carried out in order: `Issue` a call on the communicator with this rank's part
in it, `Send` a message, `Drop` a page. After `Sleep` the program sleeps until an effect, of whichever call, lets it go
on. A program that waits for a want may see a soft `Settle` too (all ranks come together at that want): it completes
the period, calls `rest()` and is served. If the boundary in `Settle` is soft and the program came for a step, it comes
again: others are not there yet.

Messages are encoded by `encode` and `decode`. The rules and why they hold: docs/design/order.md.
"""

from retrograde.transport.order.effects import (
    Abort,
    Alarm,
    Drop,
    Effect,
    Issue,
    Passed,
    Role,
    Send,
    Serve,
    ServeOneSided,
    Settle,
    Sleep,
    Timer,
)
from retrograde.transport.order.messages import MeetingPlace, NeedsAnswer, OrderMessage, decode, encode
from retrograde.transport.order.participant import Participant
from retrograde.transport.order.policy import OrderPolicy, Patience
from retrograde.transport.order.sequence import CollectiveCall
from retrograde.transport.order.tree import Tree
from retrograde.transport.order.wants import SOFT_STEP, STEP, Boundary, Gather, Reduce, Want

__all__ = [
    "SOFT_STEP",
    "STEP",
    "Abort",
    "Alarm",
    "Boundary",
    "CollectiveCall",
    "Drop",
    "Effect",
    "Gather",
    "Issue",
    "MeetingPlace",
    "NeedsAnswer",
    "OrderMessage",
    "OrderPolicy",
    "Participant",
    "Passed",
    "Patience",
    "Reduce",
    "Role",
    "Send",
    "Serve",
    "ServeOneSided",
    "Settle",
    "Sleep",
    "Timer",
    "Tree",
    "Want",
    "decode",
    "encode",
]
