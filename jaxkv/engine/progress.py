"""Compiling the steps of an engine, with a progress bar."""

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxkv.engine.buckets import Bucket
from jaxkv.engine.runner import ModelRunner

logger = logging.getLogger(__name__)


def compile_with_progress(runner: ModelRunner, *, show: bool) -> None:
    """Compiles every step of the runner; `show` draws a bar on standard error."""
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task("compiling steps", total=len(runner.buckets))

        def advance(bucket: Bucket) -> None:
            logger.debug("compiled a step of %s", bucket)
            progress.advance(task)

        runner.compile(advance)
    logger.info("compiled %d steps in %.1f s", len(runner.buckets), time.perf_counter() - start)
