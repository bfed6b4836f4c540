"""Several replays of one trace at once, on all cores."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from types import FrameType
from typing import Any

from jaxkv.errors import JaxkvError
from jaxkv.lab.job import Done, Job, run_job
from jaxkv.lab.trace import Trace

_trace: Trace | None = None
_interrupted = False
_NOT_BEGUN = "interrupted before it began"


def run_sweep(
    jobs: Sequence[Job], load: Callable[[], Trace], num_processes: int, done: Done | None = None
) -> list[dict[str, Any]]:
    """The reports of all jobs, in their order; of a job that is impossible, {"asked", "error"}.

    load: called once in each process, so it must be picklable. After Ctrl-C the jobs that run hand in what
    they have, marked partial; those that have not begun are left out.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, initializer=_start, initargs=(load,)) as pool:
        futures: list[Future[dict[str, Any]]] = [pool.submit(_run, job) for job in jobs]
        try:
            for number, _ in enumerate(as_completed(futures), 1):
                if done is not None:
                    done(number)
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            # The processes were interrupted as well; they end soon.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                pool.shutdown(wait=True, cancel_futures=True)
            finally:
                signal.signal(signal.SIGINT, before)
    return [future.result() for future in futures if not future.cancelled()]


def _start(load: Callable[[], Trace]) -> None:
    global _trace
    # Ctrl-C reaches every process. One that has no job must live on, or the results of the others are lost.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _trace = load()


def _run(job: Job) -> dict[str, Any]:
    assert _trace is not None
    if _interrupted:
        return {"asked": job.about, "error": _NOT_BEGUN}
    signal.signal(signal.SIGINT, _interrupt)
    try:
        return run_job(job, _trace)
    except JaxkvError as error:
        return {"asked": job.about, "error": str(error)}
    except KeyboardInterrupt:
        return {"asked": job.about, "error": _NOT_BEGUN}
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the running job, and keeps the next ones, which may have been handed out, from beginning."""
    global _interrupted
    _interrupted = True
    signal.default_int_handler(number, frame)
