"""Functions of rows, called where the rows are, and sums of what they return.

A source whose rows lie on several machines isn't read from one of them. A function of rows is
pickled, called in each partition's own process, and what it returns is added up there. Knows rows,
pickles and sums; no gradients, and no library that runs anything elsewhere.
"""

import hashlib
import io
import pickle
import threading

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple
from weakref import WeakKeyDictionary

import cloudpickle
import numpy as np

from pymc_sghmc.exceptions import ChainError, NonFinite
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import Chunk, InMemory, Minibatch, PoolPlan, rows_per_chunk

__all__ = ["Partition", "PartitionSum", "PartitionTask", "Refusal", "added"]

ROWS = b"rows"  # stands for them in a pickle
MOST_FUNCTIONS = 64  # compiled ones that a process keeps, of all its models

_lock = threading.Lock()
# Pickles of compiled functions of this process, and functions of others by hashes of their pickles.
_pickled: "WeakKeyDictionary[Any, bytes]" = WeakKeyDictionary()
_made: "OrderedDict[bytes, Any]" = OrderedDict()


class Partition:
    """Rows of one partition, in the place of a source's: what a function of all rows reads.

    Parameters
    ----------
    arrays : tuple of array
        Of its rows.
    number : int
        Of the partition.
    start : int
        Number of its first row in a pass over all partitions.
    pool : PoolPlan, optional
        Of the source.
    """

    threads = 1  # others work on other partitions

    def __init__(
        self, arrays: Sequence[Array], number: int, start: int, pool: PoolPlan | None
    ) -> None:
        self.arrays = tuple(arrays)
        self.number = number
        self.start = start
        self.pool = pool
        self.n_rows = [len(self.arrays[0])]

    def chunks(self, subset: Sequence[Array] | None = None) -> Iterator[Chunk]:
        """Yield its rows, or some of them, in chunks."""
        rows = np.arange(self.n_rows[0]) if subset is None else subset[0]
        step = rows_per_chunk(self.arrays)
        for start in range(0, rows.size, step):
            yield Chunk(self.number, 0, rows[start : start + step], 1.0, self.arrays)

    def part(self, group: int | None, rows: Array) -> Minibatch:
        """Return some of its rows as a minibatch."""
        return Minibatch((rows,), self.arrays)


class Refusal(NamedTuple):
    """What is wrong with the rows of a partition, found where they are."""

    error: ChainError | NonFinite


class PartitionSum(NamedTuple):
    """What a function of rows returns, added up over some partitions."""

    value: Any
    n_rows: int
    sums: Any  # of the values of the rows, by which passes are compared

    def plus(self, other: "PartitionSum") -> "PartitionSum":
        """Return the sum over the partitions of both."""
        sums = None if self.sums is None else self.sums + other.sums
        return PartitionSum(self.value + other.value, self.n_rows + other.n_rows, sums)


class PartitionTask:
    """A function of rows and its arguments, to be called in other processes.

    Compiled functions among the arguments are pickled once in this process, and made once in each
    of the others.

    Parameters
    ----------
    source : Source
        That checks rows. Its loader stays behind.
    names : list of str
        Of containers, in the order of arrays.
    pool : PoolPlan or None
    function : callable
        f(partition, *arguments); its results for two partitions can be added.
    arguments : tuple
    """

    def __init__(
        self,
        source: Any,
        names: Sequence[str],
        pool: PoolPlan | None,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        self._of_rows = cloudpickle.dumps((source, list(names), pool))
        self._functions: dict[bytes, bytes] = {}
        file = io.BytesIO()
        _Pickler(file, self._functions).dump((function, arguments))
        self._of_function = file.getvalue()

    def __call__(self, block: Any, number: int, start: int) -> "PartitionSum | Refusal":
        """Return what the function says of a block, the rows of a partition from ``start`` on."""
        source, names, pool = pickle.loads(self._of_rows)
        try:
            rows = source.checked(block)
            sums = source.sums_of(rows)
            partition = Partition([rows[name] for name in names], number, start, pool)
            file = io.BytesIO(self._of_function)
            function, arguments = _Unpickler(file, self._functions, partition).load()
            return PartitionSum(function(partition, *arguments), partition.n_rows[0], sums)
        except (ChainError, NonFinite) as error:
            return Refusal(error)


def added(results: Sequence[PartitionSum | Refusal]) -> PartitionSum | Refusal:
    """Return the sum over some partitions, in their order; or the first refusal."""
    refusals = [result for result in results if isinstance(result, Refusal)]
    if refusals:
        return refusals[0]
    first, *others = results
    for other in others:
        first = first.plus(other)  # type: ignore[union-attr, arg-type]
    return first


class _Pickler(cloudpickle.Pickler):
    """Leaves all rows behind, and compiled functions apart: see `PartitionTask`."""

    def __init__(self, file: IO[bytes], functions: dict[bytes, bytes]) -> None:
        super().__init__(file, protocol=-1)
        self._functions = functions

    def persistent_id(self, obj: Any) -> bytes | None:
        if isinstance(obj, InMemory):
            return ROWS
        if not getattr(type(obj), "is_made_once", False):
            return None
        if obj not in _pickled:
            _pickled[obj] = cloudpickle.dumps(obj)
        digest = hashlib.sha256(_pickled[obj]).digest()
        self._functions[digest] = _pickled[obj]
        return digest


class _Unpickler(pickle.Unpickler):
    """Puts a partition in the place of all rows, and functions that are made once."""

    def __init__(
        self, file: IO[bytes], functions: Mapping[bytes, bytes], partition: Partition
    ) -> None:
        super().__init__(file)
        self._functions = functions
        self._partition = partition

    def persistent_load(self, identity: bytes) -> Any:
        if identity == ROWS:
            return self._partition
        with _lock:
            if identity not in _made:
                _made[identity] = pickle.loads(self._functions[identity])
            _made.move_to_end(identity)
            while len(_made) > MOST_FUNCTIONS:
                _made.popitem(last=False)
            return _made[identity]
