"""The log-likelihood of each row of one observed variable, from wherever the rows come.

No gradient is taken, so that likelihoods without one do, too. Knows graphs and rows, no draws.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc.model import Model

from pymc_sghmc.gradients.row_inputs import Rows
from pymc_sghmc.loops.numpy_mode import compile_for_many_rows
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.models.row_model import RowModel, row_model
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory
from pymc_sghmc.rows.partitions import Partition
from pymc_sghmc.rows.sources import Source
from pymc_sghmc.rows.windows import Streamed
from pymc_sghmc.threads import in_order

__all__ = ["RowBlock", "RowLogLikelihood", "row_log_likelihood_of_model"]


class RowBlock(NamedTuple):
    """Successive rows of the data."""

    start: int  # position of the first one in a pass over all rows
    arrays: tuple[Array, ...]  # what the likelihood takes of them


class RowLogLikelihood:
    """Log-likelihood of each row of an observed variable; a row with several entries has one.

    Parameters
    ----------
    rows : RowModel
        Without rewrites.
    model : pm.Model
        Of which it was made.
    name : str
        Of the observed variable, one of `names_by_row`.
    source : Source, optional
        Yields the rows; default: they are in memory.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``.

    Attributes
    ----------
    n_rows : int
        Number of rows in a pass.
    n_data_rows : int
        Number of rows of the data as runs report it.
    row_bytes : int
        Size of a row.
    """

    def __init__(
        self,
        rows: RowModel,
        model: Model,
        name: str,
        source: Source | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        groups = rows.groups
        self._group = next(k for k, group in enumerate(groups) if name in group.terms)
        group = groups[self._group]
        before = sum(len(other.batches) for other in groups[: self._group])
        self._places = slice(before, before + len(group.batches))
        self._dtypes = [batch.dtype for batch in group.batches]
        sources = list(rows.sources)
        if source is None:
            self._data = InMemory(groups, sources, "float64", resident=lambda array: array)
            self.n_rows = self._data.n_rows[self._group]
        else:
            self._data = Streamed(source, groups, sources, "float64")
            self.n_rows = source.rows_per_pass
        self.n_data_rows = self._data.n_data_rows
        arrays = self._data.arrays[self._places]
        self.row_bytes = sum(array.itemsize * array[:1].size for array in arrays)
        term = group.terms[name]
        by_row = term.sum(axis=tuple(range(1, term.ndim)))
        inputs = [*model.value_vars, *group.batches]
        options = {"on_unused_input": "ignore", **(compile_kwargs or {})}
        self._function = compile_for_many_rows(inputs, by_row, options)

    def map_sum(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what f(data, rows, *arguments) says of all rows, see `InMemory.map_sum`."""
        return self._data.map_sum(function, self, *arguments)

    def evaluated(self, data: Rows, values: Sequence[Array]) -> Iterator[tuple[RowBlock, Array]]:
        """Yield all rows of these data, or a partition, in blocks, with the log-likelihood of each.

        Parameters
        ----------
        data : InMemory, Streamed or Partition
        values : list of array
            Of the model's value variables.
        """

        def of_block(block: RowBlock) -> tuple[RowBlock, Array]:
            with np.errstate(all="ignore"):
                return block, np.asarray(self(values, block.arrays), dtype=float)

        # others work on other partitions
        threads = data.threads if isinstance(data, Partition) else None
        return in_order(of_block, self._blocks_of(data), threads)

    def _blocks_of(self, data: Rows) -> Iterator[RowBlock]:
        """Yield all rows of these data in blocks of a few megabytes."""
        start = data.start
        for chunk in data.chunks():
            if chunk.group != self._group:
                continue
            arrays = chunk.arrays[self._places]
            yield RowBlock(start, tuple(array[chunk.rows] for array in arrays))
            start += chunk.rows.size

    def __call__(self, values: Sequence[Array], arrays: Sequence[Array]) -> Array:
        """Return the log-likelihood of each row of a block, (n,).

        Parameters
        ----------
        values : list of array
            Of the model's value variables, with their types.
        arrays : list of array
            Of a block, or rows of it.
        """
        typed = [
            np.asarray(array, dtype=dtype)
            for array, dtype in zip(arrays, self._dtypes, strict=True)
        ]
        return self._function(*values, *typed)


def row_log_likelihood_of_model(
    model: Model,
    name: str,
    point: Mapping[str, Any],
    compile_kwargs: Mapping[str, Any] | None = None,
) -> RowLogLikelihood:
    """Return that of an observed variable whose rows the model holds, those of pm.Minibatch too.

    Parameters
    ----------
    model : pm.Model
    name : str
        Of the observed variable.
    point : dict
        Near which the independence of the rows is checked.
    compile_kwargs : dict, optional

    Raises
    ------
    ValueError
        If the observed variable can't be cut into independent rows.
    """
    unknowns = Unknowns(model.continuous_value_vars, point)
    has_minibatches = bool(minibatch_outputs(model.logp(sum=False)))
    rows = row_model(model, unknowns, None if has_minibatches else {name: 1}, point)
    return RowLogLikelihood(rows, model, name, compile_kwargs=compile_kwargs)
