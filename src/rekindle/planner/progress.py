"""Progress of profiling and fitting: a bar on a terminal, else lines in the log.

Nothing is shown in the first two seconds. The bar is rich's, where it is installed; it
is drawn between measurements, never during one, so that no measured time includes it.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, TextIO, TypeVar

_log = logging.getLogger("rekindle")
_Item = TypeVar("_Item")
_PATIENCE = 2.0
"""Seconds before anything is shown, and between two lines of the log."""


class Progress:
    """Shows the stage that runs, level by level: `block 2 of 3: candidate 5 of 11`."""

    def __init__(
        self,
        wanted: bool | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = wanted
        self._stream: TextIO | None = stream or sys.stderr  # None in a program without a console
        self._clock = clock
        self._due = clock() + _PATIENCE
        self._levels: list[tuple[str, int, int]] = []
        self._bar: Any = None
        self._task: Any = None

    def report(self, stage: str) -> None:
        """Show the stage that begins."""
        self._show(stage, None)

    def counted(self, items: Sequence[_Item], word: str) -> Iterator[_Item]:
        """Yield the items, and show the number of each."""
        for i, item in enumerate(items):
            self._levels.append((word, i, len(items)))
            words = ": ".join(f"{name} {at + 1} of {count}" for name, at, count in self._levels)
            self._show(words, self._share())
            try:
                yield item
            finally:
                self._levels.pop()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _share(self) -> float:
        share, part = 0.0, 1.0
        for _, at, count in self._levels:
            part /= count
            share += at * part
        return share

    def _show(self, words: str, share: float | None) -> None:
        if self._wanted is False or self._clock() < self._due:
            return
        if not self._has_bar():
            self._due = self._clock() + _PATIENCE
            _log.info("planning goes on: %s", words)
            return
        if self._bar is None:
            self._bar, self._task = _bar(self._stream, words)
        total = None if share is None else 1.0
        self._bar.update(self._task, description=words, total=total, completed=share or 0.0)
        self._bar.refresh()

    def _has_bar(self) -> bool:
        stream = self._stream
        if stream is None or find_spec("rich") is None:
            return False
        return self._wanted is True or stream.isatty()


def _bar(stream: TextIO | None, words: str) -> tuple[Any, Any]:
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    bar = Bar(
        TextColumn("rekindle: {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(file=stream, force_terminal=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(words, total=None)
    bar.start()
    return bar, task


_current: ContextVar[Progress | None] = ContextVar("rekindle_progress", default=None)


@contextmanager
def show_progress(progress: Progress) -> Iterator[None]:
    """Show the progress of what runs inside; inside another `show_progress`, by that one."""
    if _current.get() is not None:
        yield
        return
    token = _current.set(progress)
    try:
        yield
    finally:
        _current.reset(token)
        progress.close()


def report_progress(stage: str) -> None:
    """Show the stage that begins, if progress is shown."""
    progress = _current.get()
    if progress is not None:
        progress.report(stage)


def count_progress(items: Sequence[_Item], word: str) -> Iterator[_Item]:
    """Yield the items, and show the number of each: `candidate 5 of 11`."""
    progress = _current.get()
    return iter(items) if progress is None else progress.counted(items, word)
