"""From the draws of a run to unconstrained positions, and full-data gradients there.

The gradients are those of the model's own log-density. Only a model of ``pm.Minibatch`` has none of
all data: its log-density is put together from its rows. Knows PyMC models and what ``pm.sample``
returned; of steps only that they may have other rows than the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pymc.model import Model
from pymc.pytensorf import compile, rewrite_pregrad
from pytensor.gradient import grad
from pytensor.graph.replace import clone_replace

from pymc_sghmc.checks import quoted
from pymc_sghmc.models.contract import minibatch_log_density
from pymc_sghmc.models.graphs import (
    array_of,
    data_leaves,
    density_variables,
    minibatch_outputs,
)
from pymc_sghmc.models.jumps import conditional_unknowns, jumping_unknowns
from pymc_sghmc.models.outcomes import mark_of_model
from pymc_sghmc.models.unknowns import Unknowns

__all__ = [
    "ModelRows",
    "full_data_logp",
    "given_rows",
    "posterior_draws",
    "refuse_other_rows",
    "refuse_step_with_other_rows",
    "rows_of_run",
    "rows_of_step",
    "side_by_side",
    "unconstrained_draws",
]

SAME_MARK = 1e-9  # of a sum, by which rounding changes with the order of rows and their blocks


def full_data_logp(model: Model) -> Any:
    """Return the log-density of the parameters given all data, those of ``pm.Minibatch`` too.

    PyMC's ``remove_minibatched_nodes`` fails on observed variables of two axes (PyMC 5.28, 6.4).
    """
    logp = model.logp(vars=density_variables(model))
    if not minibatch_outputs([logp]):
        return logp
    rest, groups = minibatch_log_density(model)
    by_row = [term for group in groups for term in group.terms.values()]
    all_rows = {
        batch: rows
        for group in groups
        for batch, rows in zip(group.batches, group.full_data, strict=True)
    }
    return clone_replace(
        pt.add(rest, *[term.sum() for term in by_row]), all_rows, rebuild_strict=False
    )


def posterior_draws(idata: Any, model: Model, caller: str = "check_bias") -> dict[str, np.ndarray]:
    """Return draws of each parameter on the model's own scale, (chain, draw, ...), by name.

    Parameters
    ----------
    idata : InferenceData or DataTree
    model : pm.Model
    caller : str
        Name of the function, for messages.
    """
    posterior = getattr(idata, "posterior", {})
    missing = [rv.name for rv in model.free_RVs if rv.name not in posterior]
    if missing:
        raise ValueError(
            f"{caller}: idata.posterior has no draws of {quoted(missing)}. The log-density "
            "needs all parameters of the model: pass the model that made this run, and "
            "sample without var_names. With Bambi pass Bambi's own model. Draw effects that were "
            "integrated out by recover_effects(idata, step)."
        )
    draws = {}
    for rv in model.free_RVs:
        values = posterior[rv.name].transpose("chain", "draw", ...).values.astype(rv.dtype)
        shape = values.shape[2:]
        static = rv.type.shape
        if len(shape) != len(static) or any(
            n not in (known, None) and known is not None
            for n, known in zip(shape, static, strict=True)
        ):
            raise _wrong_shape(rv, values, caller)
        draws[rv.name] = values
    _refuse_effects_without_draws(draws, caller)
    return draws


def _refuse_effects_without_draws(draws: dict[str, np.ndarray], caller: str) -> None:
    """Refuse effects that were integrated out and not drawn: all their values are NaN."""
    without = [
        name
        for name, values in draws.items()
        if values.size and values.dtype.kind == "f" and np.isnan(values).all()
    ]
    if without:
        raise ValueError(
            f"{caller}: all draws of {quoted(without)} are NaN, as those of effects that are "
            "integrated out with recover=False. Draw them by recover_effects(idata, step), and "
            "pass its result as the posterior: "
            'xr.DataTree.from_dict({"posterior": ...}), or az.InferenceData(posterior=...) with '
            "PyMC 5."
        )


def unconstrained_draws(
    model: Model, draws: dict[str, np.ndarray], caller: str = "check_bias"
) -> dict[str, np.ndarray]:
    """Map draws to the space of the value variables, shape (chain, draw, ...), by their names.

    The parameters of a transform, such as the bounds of an Interval, may depend on other variables
    and are taken at the same draw.
    """
    rvs = model.free_RVs
    transforms = model.rvs_to_transforms
    forward = [
        rv if transforms[rv] is None else transforms[rv].forward(rv, *rv.owner.inputs) for rv in rvs
    ]
    function = compile(rvs, forward, mode="FAST_COMPILE", on_unused_input="ignore")
    start = model.initial_point()
    values = [model.rvs_to_values[rv] for rv in rvs]
    n_chains, n_draws = draws[rvs[0].name].shape[:2]
    results = [np.empty((n_chains, n_draws, *start[v.name].shape), v.dtype) for v in values]
    with np.errstate(all="ignore"):
        for at in np.ndindex(n_chains, n_draws):
            outputs = function(*(draws[rv.name][at] for rv in rvs))
            for rv, result, output in zip(rvs, results, outputs, strict=True):
                if output.shape != result.shape[2:]:
                    raise _wrong_shape(rv, draws[rv.name], caller)
                result[at] = output
    return {value.name: result for value, result in zip(values, results, strict=True)}


def side_by_side(draws: Sequence[np.ndarray]) -> np.ndarray:
    """Return draws of parameters, (chain, draw, ...) each, as positions, (chain, draw, d)."""
    n_chains, n_draws = draws[0].shape[:2]
    flat = [values.reshape(n_chains, n_draws, -1) for values in draws]
    return np.concatenate(flat, axis=-1)


class ModelRows:
    """Full-data gradients from the rows that a model holds.

    Parameters
    ----------
    model : pm.Model
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``.
    """

    def __init__(self, model: Model, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self._compile_kwargs = {"on_unused_input": "ignore", **(compile_kwargs or {})}
        self._logp = full_data_logp(model)

    def gradients(self, draws: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return ∇log p of all data by the continuous parameters, shape (chain, draw, d)."""
        model = self.model
        slopes: Any = grad(rewrite_pregrad(self._logp), model.continuous_value_vars)
        gradient = pt.concatenate([slope.ravel() for slope in slopes])
        function = compile(model.value_vars, gradient, **self._compile_kwargs)
        inputs = [draws[value.name] for value in model.value_vars]
        n_chains, n_draws = inputs[0].shape[:2]
        with np.errstate(all="ignore"):
            rows = [
                function(*(values[at] for values in inputs)) for at in np.ndindex(n_chains, n_draws)
            ]
        return np.array(rows, dtype=float).reshape(n_chains, n_draws, -1)

    def jumping_variables(self, draws: Mapping[str, np.ndarray]) -> list[str]:
        """Return the names of the variables at which the log-density jumps, near a draw."""
        model = self.model
        values = model.continuous_value_vars
        conditional = conditional_unknowns(self._logp, values)
        if not conditional:
            return []
        function = compile(model.value_vars, self._logp, **self._compile_kwargs)
        point = {value.name: draws[value.name][-1, -1] for value in model.value_vars}
        unknowns = Unknowns(values, point)
        places = {model.values_to_rvs[v].name: unknowns.places[v.name] for v in conditional}
        return jumping_unknowns(
            lambda position: function(**unknowns.unravel(position, point)),
            unknowns.ravel(point),
            places,
        )


def rows_of_step(step: Any, compile_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return what has the methods of `ModelRows` for all rows of a step; None of what is no step.

    Parameters
    ----------
    step : SGHMC, SGLD, SGNHT or something else
        One that steps for several variables are joined in, too.
    compile_kwargs : dict, optional
    """
    given = given_rows(step, "check_bias")
    if given is None:
        return None
    return given.full_data(compile_kwargs) or ModelRows(given.model, compile_kwargs)


def given_rows(step: Any, caller: str) -> Any:
    """Return the model and the arguments of a step; None of what is no step.

    Parameters
    ----------
    step : SGHMC, SGLD, SGNHT or something else
        One that steps for several variables are joined in, too.
    caller : str
        Name of the function, for messages.
    """
    steps = [method for method in getattr(step, "methods", [step]) if hasattr(method, "given_rows")]
    if not steps:
        return None
    given = steps[0].given_rows
    if given is None:
        raise ValueError(
            f"{caller}: this step is a copy, without its model. Pass the step that was built in "
            "this process, or build it again."
        )
    return given


def refuse_other_rows(idata: Any, model: Model, caller: str = "check_bias") -> None:
    """Refuse to judge a run by a model that holds other data."""
    n_rows = rows_of_run(idata)
    held = {
        len(array_of(leaf))
        for variable in model.observed_RVs
        for leaf in data_leaves(model.rvs_to_values[variable])
    }
    if n_rows and n_rows not in held:
        raise ValueError(
            f"{caller}: this run was made with {n_rows:,} rows, and the model holds "
            f"{max(held, default=0):,}. After a run with data= pass the step in place of the "
            f"model, {caller}(idata, step). Else put the rows of the run into it by pm.set_data."
        )
    if n_rows and _is_another(idata, mark_of_model(model)):
        raise ValueError(
            f"{caller}: this run was made with other data than the model holds now, which have as "
            "many rows. Put the rows of the run into it by pm.set_data. After a run with data= "
            f"pass the step in place of the model, {caller}(idata, step)."
        )


def refuse_step_with_other_rows(
    idata: Any, n_rows: Sequence[int], data_mark: float, caller: str
) -> None:
    """Refuse to judge a run by a step whose data are others.

    Parameters
    ----------
    idata : InferenceData or DataTree
    n_rows : list of int
        Of each group of observations that the step has.
    data_mark : float
        Of what was observed.
    caller : str
        Name of the function, for messages.
    """
    of_run = rows_of_run(idata)
    if of_run and of_run not in n_rows:
        raise ValueError(
            f"{caller}: this run was made with {of_run:,} rows, and there are "
            f"{max(n_rows, default=0):,} now. Pass the step that made this run, or one that was "
            "built with the same data."
        )
    if _is_another(idata, data_mark):
        raise ValueError(
            f"{caller}: this run was made with other data, which have as many rows. Pass the step "
            "that made this run, or one that was built with the same data."
        )


def _is_another(idata: Any, data_mark: float) -> bool:
    """Whether the data of a run have another mark, up to rounding; False where it isn't known."""
    stats = getattr(idata, "sample_stats", {})
    if "data_mark" not in stats:
        return False
    of_run = float(stats["data_mark"].max())
    return abs(of_run - data_mark) > SAME_MARK * max(abs(of_run), abs(data_mark))


def rows_of_run(idata: Any) -> int:
    """Return the number of rows of a run's data; 0 where the run doesn't tell."""
    stats = getattr(idata, "sample_stats", {})
    return int(stats["data_rows"].max()) if "data_rows" in stats else 0


def _wrong_shape(rv: Any, values: np.ndarray, caller: str) -> ValueError:
    return ValueError(
        f"{caller}: the draws of {rv.name!r} have shape {values.shape[2:]}, which isn't the "
        "model's. Pass the model that made this run, with the same data."
    )
