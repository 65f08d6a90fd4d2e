"""The check that coefficients of groups in an effect's place give the model's own log-densities.

Knows models and their graphs, no quadrature and no chain.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pymc.logprob.utils import ParameterValueError
from pymc.model import Model
from pymc.pytensorf import compile
from pytensor import config

from pymc_sghmc.hierarchy.clustered_rows import ClusteredRows, ClusterEffect, refused
from pymc_sghmc.models.independence import STABLE
from pymc_sghmc.protocols import Array

__all__ = ["check_clusters"]

CHECKED_ROWS = 300
JITTERS = (0.5, 0.1, 0.01)  # of the start
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}


def check_clusters(
    model: Model,
    effects: Sequence[ClusterEffect],
    rows: ClusteredRows,
    term: pt.TensorVariable,
    batches: Sequence[pt.TensorVariable],
    arrays: Sequence[Array],
    index: Array,
    point: Mapping[str, Any],
) -> None:
    """Refuse effects of which numbers by group give other log-densities than the model.

    Parameters
    ----------
    model : pm.Model
    effects : list of ClusterEffect
        As the model has them.
    rows : ClusteredRows
    term : TensorVariable
        Log-likelihood of rows, as the model has it.
    batches, arrays : list
        The inputs of ``term`` that hold data, and all rows of them.
    index : array
        Number of the group of each row.
    point : dict
    """
    rng = np.random.default_rng(0)
    some = np.sort(rng.choice(index.size, min(CHECKED_ROWS, index.size), replace=False))
    numbers = pt.matrix()
    groups = pt.lvector()
    own = [term, pt.add(*[effect.prior.sum() for effect in effects], 0.0)]
    inputs = [*model.value_vars, *batches, numbers, groups]
    pairs = zip(batches, arrays, strict=True)
    data = [np.asarray(array[some], dtype=batch.dtype) for batch, array in pairs]
    try:
        of_all = rows.prior(numbers, pt.arange(rows.n_groups)).sum()
        cut = [rows.rows(numbers[groups], groups), of_all]
        function = compile(inputs, [*own, *cut], mode=STABLE, on_unused_input="ignore")
        found = [
            _at_jittered(function, model, rows, point, scale, rng, data, index[some])
            for scale in JITTERS
        ]
    except Exception as error:
        words = str(error).strip().splitlines() or [repr(error)]
        raise refused(
            effects[0].rv.name,
            f"numbers of groups don't fit into its place (PyTensor says: {words[0]})",
        ) from error
    for of_rows, prior, of_rows_too, prior_too in filter(None, found):
        if not np.allclose(of_rows, of_rows_too, **TOLERANCE):
            raise refused(
                effects[0].rv.name, "a row depends on more than the numbers of its own group"
            )
        if not np.allclose(prior, prior_too, **TOLERANCE):
            raise refused(effects[0].rv.name, "its prior isn't a sum over groups")


def _at_jittered(
    function: Callable[..., Any],
    model: Model,
    rows: ClusteredRows,
    point: Mapping[str, Any],
    scale: float,
    rng: np.random.Generator,
    data: Sequence[Array],
    index: Array,
) -> list[Array] | None:
    """Log-densities of rows and effects, twice each, near the start; None where it is rejected."""
    values = {
        v.name: np.asarray(point[v.name] + scale * rng.standard_normal(np.shape(point[v.name])))
        if v.dtype.startswith("float")
        else point[v.name]
        for v in model.value_vars
    }
    parts = [
        np.moveaxis(values[e.value.name], e.axis, 0).reshape(rows.n_groups, -1)
        for e in rows.effects
    ]
    given = [np.asarray(values[v.name], dtype=v.dtype) for v in model.value_vars]
    numbers = np.concatenate(parts, axis=1).astype(config.floatX)
    try:
        with np.errstate(all="ignore"):
            return function(*given, *data, numbers, index)
    except ParameterValueError:
        return None
