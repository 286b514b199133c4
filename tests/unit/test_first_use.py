"""What is probed before the first use, by ranks that are threads of one process."""

from __future__ import annotations

import threading
import time

import pytest

from retrograde.torch_internals import checked
from retrograde.torch_internals.probes import When


def test_ranks_that_are_threads_probe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would disturb each other: autocast's cache is the process's."""
    began: list[When] = []

    def slow(when: When) -> int:
        began.append(when)
        time.sleep(0.1)  # the other thread comes meanwhile
        return 0

    monkeypatch.setattr(checked, "check", slow)
    checked._check_once.cache_clear()
    try:
        ranks = [threading.Thread(target=checked.check_before_first_use) for _ in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    finally:
        checked._check_once.cache_clear()  # what was patched has checked nothing
    assert began == [When.FIRST_USE]
