"""Blocks of rows, worked on by threads. Knows no rows and no functions of them.

NumPy and BLAS let other threads run while they compute, so that threads of one process are enough,
and nothing is copied.
"""

import multiprocessing
import os

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np

from pymc_sghmc.pymc_hooks import one_blas_thread

__all__ = ["in_order", "n_threads"]

MOST_THREADS = 4  # as many as pm.sample uses processes, by default
AHEAD = 2  # items for each thread that are begun before the first one's result is taken

Item = TypeVar("Item")
Result = TypeVar("Result")


def n_threads() -> int:
    """Return how many threads work on blocks: one in a worker, beside which other chains run."""
    if multiprocessing.parent_process() is not None:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return min(MOST_THREADS, len(os.sched_getaffinity(0)))
    return min(MOST_THREADS, os.cpu_count() or 1)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None
) -> Iterator[Result]:
    """Yield what a function returns for each item, in their order, computed by several threads.

    Whatever the number of threads is, results are the same, as BLAS has one thread here.

    Parameters
    ----------
    function : callable
        Of an item, with compiled functions that several threads may call.
    items : iterable
        Taken as they are needed, `AHEAD` for each thread in advance.
    threads : int, optional
        Default: `n_threads`.
    """
    threads = n_threads() if threads is None else threads
    remaining = iter(items)
    first = list(islice(remaining, 2 if threads > 1 else 0))
    if len(first) < 2:  # nothing to share out
        with one_blas_thread()():
            yield from map(function, first)
            yield from map(function, remaining)
        return
    about_errors = np.geterr()  # which each thread has of its own

    def work(item: Item) -> Result:
        with np.errstate(**about_errors):
            return function(item)

    waiting: deque[Future[Result]] = deque()
    with one_blas_thread()(), ThreadPoolExecutor(threads) as pool:
        try:
            while first:
                waiting.append(pool.submit(work, first.pop(0)))
            for item in remaining:
                waiting.append(pool.submit(work, item))
                if len(waiting) > AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
