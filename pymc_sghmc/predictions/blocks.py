"""Posterior predictions of many rows, block by block, into a Zarr store.

Knows PyMC models, rows and what ``pm.sample`` returned; no step methods.
"""

import hashlib
import math
import os
import pathlib

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pymc.model import Model
from pymc.pytensorf import compile, reseed_rngs
from pytensor.tensor.random.type import RandomType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pymc_sghmc.bambi_draws import pymc_model_and_draws
from pymc_sghmc.checks import quoted, true_or_false, whole_steps
from pymc_sghmc.diagnostics.full_data import given_rows
from pymc_sghmc.diagnostics.temperatures import some_draws
from pymc_sghmc.models.graphs import observed_variables
from pymc_sghmc.predictions.rows_to_predict import RowsToPredict, old_values
from pymc_sghmc.predictions.store import PredictionStore, StoredVariable
from pymc_sghmc.protocols import Array

__all__ = ["predict_in_blocks"]

BLOCK_BYTES = 2**26  # of predictions in memory at a time
NAME = "predict_in_blocks"


def predict_in_blocks(
    idata: Any,
    model: Any,
    data: Any,
    path: str | os.PathLike[str],
    *,
    var_names: str | Sequence[str] | None = None,
    n_draws: int = 250,
    block_rows: int | None = None,
    random_seed: int | None = None,
    progressbar: bool = True,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Predict many rows, block by block, into a Zarr store that xarray opens.

    What ``pm.sample_posterior_predictive`` does with new data in ``pm.Data``, with one block of
    rows in memory at a time. Functions are compiled once, not for each block.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned. Parameters that have no draws in it are drawn from their priors
        given the others, once for all rows: leave out the effects of groups to predict new groups.
    model : pm.Model, SGHMC, SGLD or SGNHT
        The model, or a step that was made for it. Rows must lie in ``pm.Data``, and outcomes must
        follow their number, for example by ``shape=x.shape[0]`` or because their mean does. Data
        containers have their old values back at the end.
    data : dict, data frame, array, path of Parquet files, or loader
        Rows to predict, in the forms that the steps' ``data`` has. A loader is read in its own
        order. Containers that likelihoods observe need no rows.
    path : str or path
        Folder of the Zarr store. If it holds part of the same predictions, as after an
        interruption, these are completed.
    var_names : str or list of str, optional
        Deterministics and observed variables with an entry for each row. Default: the observed
        variables, of which outcomes are simulated.
    n_draws : int, default 250
        Draws, evenly spaced over all chains by their ``draw_weight``. Each takes 8 bytes a row.
    block_rows : int, optional
        Rows in a block, and in a chunk of the store. Default: 64 MB of predictions.
    random_seed : int, optional
        Of simulated outcomes. With a seed the store is the same every time.
    progressbar : bool, default True
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``mode``.

    Returns
    -------
    pathlib.Path
        That of the store: ``xr.open_zarr(path)`` opens it and loads nothing. This needs the package
        ``zarr``, as writing does not. Dims are ``chain``, ``draw`` and ``row``; rows are in the
        order of the data. The format is Zarr's version 2, which ``zarr`` 2 and 3 read.

    Raises
    ------
    ValueError
        If a variable has no entry for each row, if draws have another shape than the model's
        parameter, or if ``path`` holds something else.

    Examples
    --------
    >>> import numpy as np, pymc as pm, tempfile, xarray as xr
    >>> from pymc_sghmc import predict_in_blocks
    >>> with pm.Model() as model:
    ...     x = pm.Data("x", np.zeros(2))
    ...     slope = pm.Normal("slope")
    ...     outcome = pm.Normal("y", slope * x, 1.0, observed=np.zeros(2), shape=x.shape)
    >>> draws = xr.Dataset({"slope": (("chain", "draw"), np.full((4, 100), 2.0))})
    >>> idata = xr.DataTree.from_dict({"posterior": draws})
    >>> path = tempfile.mkdtemp() + "/predictions.zarr"
    >>> new = {"x": np.linspace(0, 1, 1000)}
    >>> path = predict_in_blocks(idata, model, new, path, n_draws=40, progressbar=False)
    >>> sorted(file.name for file in path.iterdir() if file.is_dir())
    ['chain', 'draw', 'y']
    """
    given = given_rows(model, NAME)
    idata, model = pymc_model_and_draws(idata, model if given is None else given.model, NAME)
    names = _names(model, var_names)
    rows = RowsToPredict(model, data)
    draws = _Draws(idata, model, whole_steps("n_draws", n_draws, "draws"))
    true_or_false("progressbar", progressbar)
    if block_rows is None:
        block_rows = max(1, BLOCK_BYTES // (8 * draws.n * len(names)))
    block_rows = whole_steps("block_rows", block_rows, "rows")
    made_of = {
        "n_rows": rows.n,
        "block_rows": block_rows,
        "variables": names,
        "draws_digest": draws.digest(),
        "rows_digest": rows.digest(),
        "model_digest": hashlib.sha256(model.str_repr().encode()).hexdigest()[:16],
    }
    store = PredictionStore(path, NAME, made_of, random_seed)
    with old_values(model):
        draws.complete(model, store.random_seed, compile_kwargs)
        forward = _Forward(model, names, draws, compile_kwargs)
        variables = forward.variables(rows)
        store.begin(variables, forward.labels())
        n_blocks = math.ceil(rows.n / block_rows)
        with _progress(progressbar) as bar:
            task = bar.add_task("Predicting rows", total=rows.n)
            for number in range(n_blocks):
                start = number * block_rows
                stop = min(start + block_rows, rows.n)
                if not store.has(number):
                    rows.put(start, stop)
                    forward.reseed(store.random_seed, number)
                    store.write(number, forward.predictions())
                bar.update(task, completed=stop)
    return store.path


def _names(model: Model, var_names: str | Sequence[str] | None) -> list[str]:
    """Return the names of what is predicted."""
    if var_names is None:
        return [variable.name for variable in observed_variables(model)]
    names = [var_names] if isinstance(var_names, str) else list(var_names)
    known = [rv.name for rv in (*model.deterministics, *observed_variables(model))]
    unknown = [name for name in names if name not in model.named_vars]
    if unknown or not names:
        raise ValueError(
            f"{NAME}(var_names={var_names!r}): name deterministics or observed variables of the "
            f"model, {quoted(known)}."
        )
    return names


class _Draws:
    """Some draws of the parameters, on the model's own scale."""

    def __init__(self, idata: Any, model: Model, n_draws: int) -> None:
        posterior = idata.posterior
        self.parameters = [rv for rv in model.free_RVs if rv.name in posterior]
        if not self.parameters:
            raise ValueError(f"{NAME}: idata.posterior has no draws of the model's parameters.")
        draws = {
            rv.name: posterior[rv.name].transpose("chain", "draw", ...).values
            for rv in self.parameters
        }
        draws = some_draws(idata, draws, n_draws)
        self.values = [draws[rv.name].astype(rv.dtype) for rv in self.parameters]
        self.shape = self.values[0].shape[:2]
        self.chains = np.asarray(posterior[self.parameters[0].name]["chain"].values)
        for rv, array in zip(self.parameters, self.values, strict=True):
            shape = tuple(int(n) for n in np.atleast_1d(rv.shape.eval())) if rv.ndim else ()
            if array.shape[2:] != shape:
                raise ValueError(
                    f"{NAME}: the draws of {rv.name!r} have shape {array.shape[2:]}, and the "
                    f"model's {rv.name!r} has {shape}. To predict new groups leave its draws out."
                )
            if array.dtype.kind == "f" and np.isnan(array).all():
                raise ValueError(
                    f"{NAME}: all draws of {rv.name!r} are NaN, as those of effects that are "
                    "integrated out with recover=False. Draw them by recover_effects(idata, step) "
                    "for known groups, or leave them out for new groups."
                )

    @property
    def n(self) -> int:
        """Number of draws over all chains."""
        return int(np.prod(self.shape))

    def complete(
        self, model: Model, random_seed: int, compile_kwargs: Mapping[str, Any] | None
    ) -> None:
        """Draw the parameters that have no draws, given those that have."""
        missing = [rv for rv in model.free_RVs if rv not in self.parameters]
        if not missing:
            return
        function = _compiled(self.parameters, missing, compile_kwargs)
        reseed_rngs(_generators(function), [random_seed, 0])
        drawn = [function(*[array[at] for array in self.values]) for at in np.ndindex(*self.shape)]
        for rv, *values in zip(missing, *drawn, strict=True):
            self.parameters.append(rv)
            self.values.append(np.reshape(values, (*self.shape, *np.shape(values[0]))))

    def digest(self) -> str:
        """Return what tells these draws from others."""
        digest = hashlib.sha256()
        for rv, array in zip(self.parameters, self.values, strict=True):
            digest.update(rv.name.encode())
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()[:16]


def _compiled(
    inputs: Sequence[Any], outputs: Sequence[Any], compile_kwargs: Mapping[str, Any] | None
) -> Any:
    """Compile a function that computes variables from parameters, or draws them."""
    return compile(inputs, outputs, **{"on_unused_input": "ignore", **(compile_kwargs or {})})


def _generators(function: Any) -> list[Any]:
    """Return the random generators of a compiled function."""
    return [v for v in function.get_shared() if isinstance(v.type, RandomType)]


class _Forward:
    """From the draws to predictions of the rows that the model holds now, compiled once."""

    def __init__(
        self,
        model: Model,
        names: Sequence[str],
        draws: _Draws,
        compile_kwargs: Mapping[str, Any] | None,
    ) -> None:
        self._model = model
        self._names = names
        self._draws = draws
        self._outputs = [model[name] for name in names]
        self._function = _compiled(draws.parameters, self._outputs, compile_kwargs)

    def reseed(self, random_seed: int, block: int) -> None:
        """Begin the random numbers of a block, whichever blocks came before."""
        reseed_rngs(_generators(self._function), [random_seed, block + 1])

    def variables(self, rows: RowsToPredict) -> list[StoredVariable]:
        """Return what is predicted, or refuse what doesn't follow the number of rows."""
        by_count = {}
        for n in sorted({1, min(2, rows.n)}):
            rows.put(0, n)
            try:
                by_count[n] = self._one(0, 0)
            except Exception as error:  # shapes that don't agree, as a rule
                self._refuse_missing_rows(rows, error)
                raise
        found = []
        for i, name in enumerate(self._names):
            lengths = {n: values[i].shape[:1] for n, values in by_count.items()}
            if any(length != (n,) for n, length in lengths.items()):
                self._refuse_missing_rows(rows)
                raise ValueError(
                    f"{NAME}: {name!r} has no entry for each row of the data: with {max(lengths)} "
                    f"rows its shape is {by_count[max(lengths)][i].shape}. Leave it out of "
                    "var_names, or give it a shape that follows the data, such as "
                    "shape=x.shape[0]."
                )
            value = by_count[1][i]
            dims = tuple(self._model.named_vars_to_dims.get(name, ()))[1:]
            dims = tuple(dim or f"{name}_dim_{k + 1}" for k, dim in enumerate(dims))
            dims = dims or tuple(f"{name}_dim_{k}" for k in range(1, value.ndim))
            shape = (*self._draws.shape, rows.n, *value.shape[1:])
            found.append(StoredVariable(name, ("chain", "draw", "row", *dims), shape, value.dtype))
        return found

    def _refuse_missing_rows(self, rows: RowsToPredict, cause: Exception | None = None) -> None:
        """Refuse data without the rows of a container that a prediction depends on."""
        missing = rows.missing_for(self._outputs)
        if missing:
            raise ValueError(
                f"{NAME}: data= has no rows of {quoted(missing)}, on which the predictions of "
                f"{quoted(self._names)} depend. Pass these rows, too, in the order of the others."
            ) from cause

    def labels(self) -> dict[str, Array]:
        """Return the coords of the dims, but for the rows."""
        labels = {"chain": self._draws.chains, "draw": np.arange(self._draws.shape[1])}
        for name in self._names:
            for dim in self._model.named_vars_to_dims.get(name, ())[1:]:
                if dim is not None and self._model.coords.get(dim) is not None:
                    labels[dim] = np.asarray(self._model.coords[dim])
        return labels

    def _one(self, chain: int, draw: int) -> list[Array]:
        values = self._function(*[array[chain, draw] for array in self._draws.values])
        return list(values)

    def predictions(self) -> list[Array]:
        """Return predictions of the rows that the model holds, (chain, draw, row, ...)."""
        out: list[Array] = []
        for chain, draw in np.ndindex(*self._draws.shape):
            values = self._one(chain, draw)
            if not out:
                out = [np.empty((*self._draws.shape, *v.shape), v.dtype) for v in values]
            for whole, value in zip(out, values, strict=True):
                whole[chain, draw] = value
        return out


def _progress(is_shown: bool) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeRemainingColumn(), disable=not is_shown)
