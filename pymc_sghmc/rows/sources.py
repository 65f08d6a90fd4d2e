"""Data that come from elsewhere than the model: arrays and loaders, checked against its containers.

Knows models and rows, no gradients and no chains.
"""

import os

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from pymc.model import Model

from pymc_sghmc.exceptions import ChainError
from pymc_sghmc.models.graphs import array_of
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.files import mapped_file
from pymc_sghmc.rows.reading import Reader

__all__ = ["Source", "StreamError", "check_file", "given_arrays"]

PILOT_ROWS = 50_000  # at hand for what needs some rows only, at most
PILOT_BYTES = 2**27


class StreamError(ChainError, ValueError):
    """A loader doesn't keep its word."""


def given_arrays(model: Model, arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Check the arrays that take the place of what data containers hold; no copy is made.

    Returns
    -------
    dict of {str: np.ndarray}
    """
    if not arrays:
        raise ValueError("data={}: give the rows of at least one container of the model.")
    checked = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) and not hasattr(array, "__array_interface__"):
            raise ValueError(
                f"data=: {name!r} is a {type(array).__name__}, which would have to be copied into "
                "memory. Pass a NumPy array or an np.memmap; for Zarr and HDF5 pass "
                "data=pymc_sghmc.loaders.ArrayLoader({...}), which reads blocks of rows."
            )
        check_file(name, array)
        array = np.asarray(array)
        problem = _misfit(_container(model, name), array)
        if not array.dtype.isnative:
            problem = f"has dtype {array.dtype.str}, not this machine's byte order. Convert it."
        if problem:
            raise ValueError(f"data=: {name!r} {problem}")
        checked[name] = array
    _same_lengths(checked, arrays, "data=")
    if len(next(iter(checked.values()))) == 0:
        raise ValueError("data=: the arrays have no rows.")
    return checked


class Source:
    """A loader whose blocks are checked: names, shapes, kinds of numbers, and rows in a pass.

    Parameters
    ----------
    loader : iterable
        See `pymc_sghmc.loaders`.
    model : pm.Model
    """

    def __init__(self, loader: Any, model: Model) -> None:
        self.loader = loader
        if isinstance(loader, Iterator) or not (
            hasattr(loader, "__iter__") or hasattr(loader, "blocks")
        ):
            raise ValueError(
                f"data={loader!r}: one pass over the data isn't enough, and an iterator or a "
                "generator gives no second one. Pass an object whose __iter__ begins a new pass "
                "and whose len is the number of rows; ready-made ones are in pymc_sghmc.loaders."
            )
        self.n_rows = _n_rows(loader)
        # Loaders of batches leave an incomplete last one out, unless they say that they don't.
        size = getattr(loader, "batch_size", None) if getattr(loader, "drop_last", True) else None
        self.dropped = self.n_rows % size if isinstance(size, int) and size > 0 else 0
        self.containers = {variable.name: variable for variable in model.data_vars}
        self.names = list(self.containers)
        self.first: dict[str, Array] = None  # type: ignore[assignment]
        blocks = self.blocks(np.random.default_rng(0))
        block = next(blocks)
        blocks.close()
        self.block_rows = len(next(iter(block.values())))
        self.first = {
            name: array[:1].astype(array.dtype.newbyteorder("=")) for name, array in block.items()
        }
        self.containers = dict.fromkeys(self.containers)  # only their names count from here
        self.names = list(self.first)

    @property
    def rows_per_pass(self) -> int:
        """Number of rows in one pass."""
        return self.n_rows - self.dropped

    def pilot(self) -> dict[str, Array]:
        """Return copies of the first rows, for what needs some rows only."""
        row_bytes = sum(row.nbytes for row in self.first.values())
        n_rows = min(PILOT_ROWS, max(1000, PILOT_BYTES // row_bytes), self.rows_per_pass)
        with closing(Reader(self, list(self.first), 0)) as reader:
            return dict(zip(self.first, reader.read(0, n_rows), strict=True))

    def blocks(self, rng: np.random.Generator) -> Generator[dict[str, Array], None, None]:
        """Yield the blocks of one pass, in the loader's order or in its order for ``rng``."""
        seen = 0
        try:
            shuffled = getattr(self.loader, "blocks", None)
            for block in iter(self.loader) if shuffled is None else shuffled(rng):
                arrays = self._checked(block)
                n = len(next(iter(arrays.values())))
                seen += n
                if seen > self.n_rows:
                    raise StreamError(
                        f"data=: a pass over the loader yields {seen} rows and more, but its "
                        f"length is {self.n_rows}, by which the likelihood is weighted. Give it a "
                        "len (or total_size) that is the number of rows"
                    )
                kept = n - max(0, seen - self.rows_per_pass)
                if kept > 0:
                    yield {name: array[:kept] for name, array in arrays.items()}
        except StreamError:
            raise
        except Exception as error:
            raise StreamError(f"the loader raised {type(error).__name__}: {error}") from error
        if seen == 0:
            raise StreamError(
                "data=: a pass over the loader yields no rows. Each call of iter(loader) must "
                "begin a new pass; one that goes through a generator is at its end after the "
                "first"
            )
        if seen < self.rows_per_pass:
            raise StreamError(
                f"data=: a pass over the loader yields {seen} rows, but its length is "
                f"{self.n_rows}, by which the likelihood is weighted. Is a file cut short, or does "
                "len count blocks? It (or total_size) must be the number of rows"
            )

    def _checked(self, block: Any) -> dict[str, Array]:
        if isinstance(block, np.ndarray) and len(self.names) == 1:
            block = {self.names[0]: block}
        if not isinstance(block, Mapping):
            raise StreamError(
                f"data=: the loader yields {type(block).__name__}, not dicts of arrays by the "
                f"names of the model's containers {_listing(self.containers)}. A bare array will "
                "do where there is one container"
            )
        if self.first is None:
            arrays = {name: np.asarray(array) for name, array in block.items()}
            for name, array in arrays.items():
                problem = _misfit(_container(self.containers, name), array)
                if problem:
                    raise StreamError(f"data=: in a block {name!r} {problem.rstrip('.')}")
        else:
            if block.keys() != self.first.keys():
                raise StreamError(
                    f"data=: a block holds {_listing(block)}, the first one held "
                    f"{_listing(self.first)}. All need the same names"
                )
            arrays = {name: np.asarray(block[name]) for name in self.first}
            for name, array in arrays.items():
                first = self.first[name]
                if array.shape[1:] != first.shape[1:] or array.ndim != first.ndim:
                    raise StreamError(
                        f"data=: in a block {name!r} has shape {array.shape}; from the first block "
                        f"its rows have shape {first.shape[1:]}"
                    )
                if not np.can_cast(array.dtype, first.dtype, "same_kind"):
                    raise StreamError(
                        f"data=: in a block {name!r} has dtype {array.dtype}, which isn't of the "
                        f"kind of the first block's {first.dtype}"
                    )
        _same_lengths(arrays, {}, "data=: in a block")
        return arrays


def check_file(name: str, array: Array) -> None:
    """Refuse an `np.memmap` whose file has become shorter than it."""
    file = mapped_file(array)
    if file is not None and file.is_cut_short:
        raise ValueError(
            f"data=: the file {file.name} of {name!r} has {os.path.getsize(file.name)} bytes, "
            f"fewer than the {file.needed} of its rows: it was cut short."
        )


def _container(model: Model | dict[str, Any], name: str) -> Any:
    containers = model if isinstance(model, dict) else {v.name: v for v in model.data_vars}
    if name not in containers:
        raise StreamError(
            f"data=: the model has no container {name!r}, only {_listing(containers) or 'none'}. "
            "Build it with a few of the rows in pm.Data of that name"
        )
    return containers[name]


def _misfit(container: Any, array: Array) -> str | None:
    """Say what keeps an array from taking the place of what a container holds."""
    held = array_of(container)
    if array.ndim != held.ndim or array.shape[1:] != held.shape[1:]:
        return (
            f"has shape {array.shape}, but rows of shape {held.shape[1:]} in the model. Build the "
            "model with a few of these rows."
        )
    if not np.can_cast(array.dtype, container.dtype, "same_kind") or array.dtype.kind not in "biuf":
        return (
            f"has dtype {array.dtype}, which isn't of the kind of {container.dtype} in the model. "
            "Build the model with a few of these rows."
        )
    return None


def _same_lengths(arrays: Mapping[str, Array], originals: Mapping[str, Any], where: str) -> None:
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(
            f"{name!r} has {n}{_filename(originals.get(name))}" for name, n in lengths.items()
        )
        raise StreamError(f"{where} the arrays have different numbers of rows: {counts}")


def _filename(array: Any) -> str:
    filename = getattr(array, "filename", None)
    return f" (file {os.fspath(filename)})" if filename is not None else ""


def _n_rows(loader: Any) -> int:
    n_rows = getattr(loader, "total_size", None)
    if n_rows is None:
        try:
            n_rows = len(loader)
        except TypeError:
            raise ValueError(
                f"data={loader!r}: doesn't tell the number of rows, by which the likelihood is "
                "weighted. Give the loader a __len__ or a total_size that is the number of rows."
            ) from None
    if isinstance(n_rows, bool) or not hasattr(n_rows, "__index__") or n_rows < 1:
        raise ValueError(
            f"data={loader!r}: has a length of {n_rows}. It must be the number of rows, at least 1."
        )
    return int(n_rows)


def _listing(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
