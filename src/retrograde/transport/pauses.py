"""How long a thread that waits may sleep until it looks again.

Most of what is waited for is told: whoever sleeps is woken. But nobody tells that a call of a backend is done. There a
wait begins with short pauses, and they grow with it: little is lost where the call is quick, and where ranks are many
more than cores, looking does not take the time in which others could bring what is waited for.
"""

import time

_SHARE = 1 / 16  # of the time that has been waited: a pause
_LONGEST = 0.01  # seconds


class Pauses:
    """The pauses of one wait."""

    def __init__(self, timeout: float, look_again: float | None) -> None:
        """`timeout`: seconds for which the wait lasts. `look_again`: of the first pause; None: all changes are told."""
        self._began = time.monotonic()
        self._timeout = timeout
        self._shortest = look_again

    def next(self) -> float:
        """Seconds to sleep now. None are left when the time is over."""
        waited = time.monotonic() - self._began
        left = self._timeout - waited
        if self._shortest is None:
            return left
        return min(left, max(self._shortest, min(_SHARE * waited, _LONGEST)))
