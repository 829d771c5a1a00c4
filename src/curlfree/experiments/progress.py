"""Progress of an experiment on standard error: what it does, how far it is, its rate and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str], None]
"""Called after each unit of work with what the work is."""


def silent(what: str) -> None:
    """Show nothing."""


@contextmanager
def shown(total: int, unit: str) -> Iterator[Advance]:
    """A progress bar of so many units of work.

    Args:
        total: how many units there are.
        unit: what one is called.

    Yields:
        What to call after each.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=total, rate="")
        task = progress.tasks[0]

        def advance(what: str) -> None:
            rate = f"{task.speed:.3g} {unit}/s" if task.speed else ""
            progress.update(bar, advance=1, description=what, rate=rate)

        yield advance
