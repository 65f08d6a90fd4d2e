"""The check that rows of data are independent given the parameters, and its messages."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pymc.logprob.utils import ParameterValueError
from pymc.model import Model
from pymc.pytensorf import compile
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.type import discrete_dtypes
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.checks import quoted
from pymc_sghmc.compat import LAST, WithoutInnerGraphs
from pymc_sghmc.exceptions import NeedsAllRows
from pymc_sghmc.models.bad_data import not_finite
from pymc_sghmc.models.graphs import array_of, full_data
from pymc_sghmc.protocols import Array

if TYPE_CHECKING:
    from pymc_sghmc.models.contract import Group

__all__ = ["STABLE", "check_rows", "leading_dim", "not_sliceable"]

# Jitters of the starting point for the check of rows: at the start itself coefficients are often
# zero and hide what they multiply; far from it log-densities may be infinite, the sooner the larger
# the predictors. The first points at which they are finite are enough.
JITTERS = (0.5, 0.1, 0.02, 0.004, 1e-4, 1e-6, 0.0)
ENOUGH_POINTS = 4
# The first is the quickest to run. The other doesn't take log(1 − sigmoid(η)) for −∞ at η > 37.
FAST = get_mode("FAST_COMPILE").register((WithoutInnerGraphs(), LAST))
STABLE = FAST.including("stabilize", "specialize")
MODES = (FAST, STABLE)
# Sizes of the batches in the check. Several, so that none can hide by agreeing with another
# length of the model; many single rows, because a maximum or a count shows in them first.
CHECK_SIZES = (*[1] * 8, 2, 3, 7, 16)
MAX_CHECKED_ROWS = 100_000


def check_rows(model: Model, groups: Sequence["Group"], point: Mapping[str, Any]) -> None:
    """Refuse terms that are not computed row by row.

    A term f must satisfy f(data[idx]) = f(data)[idx] for any rows idx in any order. It is tested
    on all rows (a view of some, spread evenly, where they are many), and on a few rows with
    other values in the data containers, because placeholders such as zeros hide what
    ``pm.set_data`` will show.
    """
    for group in groups:
        rng = np.random.default_rng(0)
        arrays = [array_of(source) for source in group.full_data]
        n_rows = len(arrays[0])
        step = 1 + (n_rows - 1) // MAX_CHECKED_ROWS
        some = rng.integers(n_rows, size=50)
        few = [array[some] for array in arrays]
        many = [array[::step] for array in arrays]
        other = [
            array if isinstance(source, Constant) else _other_values(array, rng)
            for source, array in zip(group.full_data, few, strict=True)
        ]
        for mode in MODES:
            terms = _compiled(model, group, mode)
            n_finite = 0
            points = []
            for scale in JITTERS:
                theta = [_jittered(point[v.name], v, scale, rng) for v in model.value_vars]
                points.append(theta)
                # The few first: a term that isn't computed by row may need N² entries.
                if all(_row_by_row(model, group, terms, theta, data, rng) for data in (few, many)):
                    n_finite += 1
                    _row_by_row(model, group, terms, theta, other, rng, certain=False)
                if n_finite == ENOUGH_POINTS:
                    break
            if n_finite == ENOUGH_POINTS:
                break
        if n_finite == 0:
            named = [
                (source.name, array) for source, array in zip(group.full_data, many, strict=True)
            ]
            raise not_finite(model, group.terms, terms, points, named, step)
        _check_picked_rows(model, group, terms, points)


def _check_picked_rows(
    model: Model,
    group: "Group",
    terms: Callable[..., list[Array]],
    points: Sequence[Sequence[Array]],
) -> None:
    """Refuse rows that are picked from a predictor whose rows need each other."""
    if not group.as_written:
        return
    names = list(group.as_written)
    outputs = [group.as_written[name] for name in names]
    as_written = compile(model.value_vars, outputs, mode=STABLE, on_unused_input="ignore")
    arrays = [array_of(source) for source in group.full_data]
    for theta in points:
        with np.errstate(all="ignore"):
            found = dict(zip(group.terms, terms(*theta, *arrays), strict=True))
            for name, whole in zip(names, as_written(*theta), strict=True):
                if not _agree(found[name], whole, _tolerance([*theta, *arrays])):
                    raise _not_independent(model, name, group.n_rows)


def _compiled(model: Model, group: "Group", mode: Any) -> Callable[..., list[Array]]:
    inputs = [*model.value_vars, *group.batches]
    try:
        return compile(inputs, list(group.terms.values()), mode=mode, on_unused_input="ignore")
    except Exception as error:
        raise not_sliceable(model, next(iter(group.terms)), group.n_rows, error) from error


def _row_by_row(
    model: Model,
    group: "Group",
    terms: Callable[..., list[Array]],
    theta: Sequence[Array],
    arrays: Sequence[Array],
    rng: np.random.Generator,
    certain: bool = True,
) -> bool:
    """Compare the log-likelihood of rows alone and in company; tell whether all of it is finite.

    With ``certain=False`` the arrays hold invented values, which a model may reject.
    """
    n = len(arrays[0])
    name = next(iter(group.terms))
    batches = [rng.integers(n, size=size) for size in CHECK_SIZES]
    tolerance = _tolerance([*theta, *arrays])
    try:
        with np.errstate(all="ignore"):
            everything = terms(*theta, *arrays)
            results = [terms(*theta, *(array[idx] for array in arrays)) for idx in batches]
    except ParameterValueError:
        return False
    except Exception as error:
        if not certain:
            return False
        if isinstance(error, IndexError) and _is_finite_on_all(group, terms, theta):
            raise NeedsAllRows(
                f"The rows of {name!r} look up other rows by number, as X[previous], so that they "
                "can't be evaluated on some of these.",
                "Look them up before the model: pm.Data('X_previous', X[previous]).",
            ) from error
        raise not_sliceable(model, name, group.n_rows, error) from error
    for idx, parts in zip([np.arange(n), *batches], [everything, *results], strict=True):
        for name, part, whole in zip(group.terms, parts, everything, strict=True):
            shape = np.shape(part)
            if shape[:1] != idx.shape or shape[1:] != np.shape(whole)[1:]:
                reason = f"{len(idx)} rows of data give a log-likelihood of shape {shape}"
                raise not_sliceable(model, name, group.n_rows, reason)
            if not _agree(part, whole[idx], tolerance):
                if any(array.dtype.kind == "f" and np.isnan(array).any() for array in arrays):
                    return False  # a missing value makes all rows beside it infinite
                raise _not_independent(model, name, group.n_rows)
    return all(np.isfinite(whole).all() for whole in everything)


def _not_independent(model: Model, name: str, n_rows: int) -> NeedsAllRows:
    return NeedsAllRows(
        f"The rows of {name!r} are not independent given the parameters: the log-likelihood of the "
        "same rows changes with which other rows are in the minibatch.",
        "Compute means, sums, sorts, differences, positions and recursions over rows (such as "
        f"X.mean(axis=0)) from the full data before the model.{_same_length(model, name, n_rows)}",
        "For time series and Gaussian processes use NUTS.",
    )


def _tolerance(arrays: Sequence[Array]) -> float:
    """Relative difference of log-likelihoods that rounding may make."""
    # a float32 array anywhere limits what can be seen
    return 1e-4 if any(array.dtype == np.float32 for array in arrays) else 1e-8


def _agree(part: Array, whole: Array, tolerance: float) -> bool:
    """Whether the log-likelihoods of rows alone are those in company, wherever both are finite.

    Where numbers overflow, what a row alone gives and what many give at once may differ.
    """
    is_finite = np.isfinite(part) & np.isfinite(whole)
    return np.allclose(part[is_finite], whole[is_finite], rtol=tolerance, atol=tolerance)


def _is_finite_on_all(
    group: "Group", terms: Callable[..., list[Array]], theta: Sequence[Array]
) -> bool:
    """Whether the log-likelihood can be evaluated on all rows together."""
    try:
        with np.errstate(all="ignore"):
            values = terms(*theta, *[array_of(source) for source in group.full_data])
    except Exception:
        return False
    return all(np.isfinite(value).all() for value in values)


def not_sliceable(model: Model, name: str, n_rows: int, reason: str | Exception) -> ValueError:
    """Explain that the likelihood ``name`` needs all of its rows at once."""
    shapes = {name: np.shape(value) for name, value in model.initial_point().items()}
    by_row = [rv for rv in model.free_RVs if shapes[model.rvs_to_values[rv].name][:1] == (n_rows,)]
    if joint := _with_joint_prior(model, by_row):
        return NeedsAllRows(
            f"The likelihood of {name!r} can't be evaluated on some of its {n_rows} rows: "
            f"{quoted(joint)} has an entry for each row, and its prior is a joint one, such as a "
            "time series or a Gaussian process.",
            instead="Pass batch_size=None, or use NUTS.",
        )
    first_line = str(reason).strip().splitlines()[0] if str(reason).strip() else repr(reason)
    source = "PyTensor says" if isinstance(reason, Exception) else "What was seen"
    if lies_on_its_side(model, model[name]):
        return NeedsAllRows(
            f"The likelihood of {name!r} can't be evaluated on some of its {n_rows} rows "
            f"({source}: {first_line}). Rows lie along the first axis of an observed variable, and "
            f"{name!r} is longer along another.",
            "If its rows lie there, turn the data of the model so that these come first.",
        )
    hint = f"{_without_entries_by_row(by_row, n_rows)} " if by_row else ""
    if isinstance(reason, IndexError) or "out of bounds" in first_line:
        return ValueError(
            f"The likelihood of {name!r} picks entries by number, as u[group], and some rows have "
            f"a number for which there is no entry ({first_line}). Numbers count from 0: give the "
            "parameter one entry more than the largest number."
        )
    return NeedsAllRows(
        f"The likelihood of {name!r} can't be evaluated on some of its {n_rows} rows "
        f"({source}: {first_line}).",
        f"{hint}Put the rows of all its data on the leading axis, in the same order; pick rows by "
        "a mask, as X[mask], before the model; put constants that the model transposes or repeats "
        "into pm.Data; replace hard-coded row counts (tile, repeat, scan) by shapes."
        f"{_same_length(model, name, n_rows)}",
    )


def lies_on_its_side(model: Model, observed: Variable) -> bool:
    """Whether an outcome is longer along another axis than its first, where rows lie."""
    shape = tuple(full_data(model.rvs_to_values[observed]).shape.eval())
    return len(shape) > 1 and max(shape) > shape[0]


def _with_joint_prior(model: Model, variables: list[TensorVariable]) -> list[str]:
    """Return the names of those variables whose prior isn't a product over entries."""
    terms = model.logp(vars=variables, sum=False) if variables else []
    return [rv.name for rv, term in zip(variables, terms, strict=True) if term.type.ndim == 0]


def _without_entries_by_row(by_row: Sequence[Variable], n_rows: int) -> str:
    """Advise where parameters have an entry for each row."""
    discrete = [rv.name for rv in by_row if rv.dtype in discrete_dtypes]
    if discrete:
        return (
            f"A discrete parameter with one entry per row, as {quoted(discrete)}, can't be sampled "
            "from minibatches. Sum over its values in the likelihood, as pm.Mixture does."
        )
    names = [rv.name for rv in by_row]
    return (
        f"A parameter with one entry per row, as {quoted(names)}, can't be sampled from "
        "minibatches. Integrate it out: give it a prior without data of the rows, let them see "
        f"{names[0]}[i] with i = pm.Data('i', np.arange({n_rows})), and pass "
        f"marginalize={names!r}."
    )


def leading_dim(model: Model, name: str | None) -> str | None:
    """Name of the first dim of a variable of the model, or None."""
    dims = model.named_vars_to_dims.get(name)
    return dims[0] if dims else None


def _same_length(model: Model, name: str, n_rows: int) -> str:
    """Advice where the lengths of arrays may have misled: which are taken for rows, which not."""
    dims = {
        data.name: leading_dim(model, data.name)
        for data in model.data_vars
        if np.shape(array_of(data))[:1] == (n_rows,)
    }
    own = leading_dim(model, name)
    left_out = [data for data, dim in dims.items() if own is not None and dim not in (None, own)]
    if left_out:
        return (
            f" {quoted(left_out)} has {n_rows} rows but another leading dim than {name!r} "
            f"({own!r}), so it isn't cut with them: give it that dim if its rows are the same."
        )
    return (
        f" Is there an array of {n_rows} entries that are not these rows, such as a table of "
        f"groups? Then put it into a pm.Data, and give it and {name!r} different dims."
    )


def _other_values(array: Array, rng: np.random.Generator) -> Array:
    """Return values like those of ``array`` but never all the same."""
    if array.dtype.kind == "f":
        noise = 0.1 * rng.standard_normal(array.shape)
        has_scale = (array != 0) & np.isfinite(array)  # infinite bounds stay what they are
        return (array + noise * np.where(has_scale, array, 1)).astype(array.dtype)
    if array.dtype.kind in "iu":
        low = array.min()
        high = max(array.max(), array.min() + 1)
        return rng.integers(low, high, size=array.shape, endpoint=True).astype(array.dtype)
    return array


def _jittered(start: Any, value: TensorVariable, scale: float, rng: np.random.Generator) -> Array:
    if value.dtype.startswith("float"):
        start = start + scale * rng.standard_normal(np.shape(start))
    return np.asarray(start, dtype=value.dtype)
