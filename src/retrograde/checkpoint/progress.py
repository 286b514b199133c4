"""A bar in the terminal for bytes that are written or read."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars


class ProgressBar:
    """A progress bar, shown if `wanted`; if that is None, shown if stderr is a terminal."""

    def __init__(self, label: str, wanted: bool | None, total: int | None = None) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        shows = console.is_terminal if wanted is None else wanted
        self._bars = Bars(*columns, console=console, disable=not shows)
        self._task = self._bars.add_task(label, total=total)

    def told(self, count: int) -> None:
        """Advance the bar by this number of bytes."""
        self._bars.advance(self._task, count)

    def __enter__(self) -> "ProgressBar":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
