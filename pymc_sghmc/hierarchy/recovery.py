"""Effects that were integrated out, drawn afterwards for some draws of a finished run.

Knows what ``pm.sample`` gives back and steps; no sampler.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pytensor.tensor as pt
import xarray as xr

from numpy.typing import ArrayLike
from pymc.model import Model, modelcontext
from pymc.progress_bar import CustomProgress
from pymc.pytensorf import compile

from pymc_sghmc.bambi_draws import pymc_model_and_draws
from pymc_sghmc.checks import generator_of, quoted, whole_steps
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.hierarchy.marginal import Marginal, marginal_of
from pymc_sghmc.protocols import Array

__all__ = ["recover_effects"]


def recover_effects(
    idata: Any,
    step: Any,
    *,
    draws: int = 250,
    groups: ArrayLike | None = None,
    random_seed: int | np.random.Generator | None = None,
    model: Any = None,
    progressbar: bool = True,
) -> xr.Dataset:
    """Draw the effects that a step integrated out, given some draws of all other unknowns.

    For each draw of the posterior's, a few Metropolis steps with proposals from a t distribution
    around where the group's effects lie; about nine of ten are accepted.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` gave back, by a step with ``marginalize``.
    step : SGHMC, SGLD or SGNHT
        The step, or one that is made like it.
    draws : int, default 250
        Draws of each chain, evenly spread, for which effects are drawn; all, where there are no
        more. 250 of four chains tell means to a thirtieth of a standard deviation.
    groups : array of int, optional
        Numbers of the groups whose effects are wanted, as rows have them; default: all. Of a
        million groups each draw of all effects takes 8 MB and some seconds.
    random_seed : int or numpy.random.Generator, optional
    model : pm.Model or bambi.Model, optional
        Whose draws they are; that of the context where none is given.
    progressbar : bool, default True

    Returns
    -------
    xarray.Dataset
        With the effects' names, dims and coordinates, as ``pm.sample`` gives them, and the same
        draws of all other variables of the posterior; with ``groups``, of those that don't have
        one of the effects' dims. It can be passed to ``pm.sample_posterior_predictive``.

    Raises
    ------
    TypeError
        If the first isn't a result with a posterior, or the second no step of this package.
    ValueError
        If the step integrates nothing out, the posterior lacks an unknown, or there are no such
        groups.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGHMC, recover_effects
    >>> rng = np.random.default_rng(0)
    >>> group = np.repeat(np.arange(40), 5)
    >>> with pm.Model() as model:
    ...     tau = pm.HalfNormal("tau", 1)
    ...     u = pm.Normal("u", 0, tau, shape=40)
    ...     y = pm.Normal("y", u[group], 1, observed=rng.normal(rng.normal(size=40)[group]))
    ...     step = SGHMC(marginalize="u", recover=False)
    ...     idata = pm.sample(
    ...         20, tune=20, step=step, chains=2, cores=1, progressbar=False, random_seed=1
    ...     )
    ...     found = recover_effects(idata, step, draws=10, random_seed=2, progressbar=False)
    ...     some = recover_effects(
    ...         idata, step, draws=10, groups=[3, 7], random_seed=2, progressbar=False
    ...     )
    >>> found["u"].shape, some["u"].shape
    ((2, 10, 40), (2, 10, 2))
    """
    model, gradient = _checked_run(idata, step, model)
    idata, model = pymc_model_and_draws(idata, model, "recover_effects")
    marginal = marginal_of(gradient.density)
    if marginal is None:
        raise ValueError(
            "recover_effects: this step integrates nothing out. Make it with marginalize=."
        )
    wanted_groups = _checked(groups, marginal.n_groups)
    rng = generator_of("recover_effects: random_seed", random_seed)
    n_draws = whole_steps("draws", draws, "draws")
    gradient.data.reload()  # pm.set_data may have changed the groups, which is refused, or the rows
    if not gradient.density.placement_needs_others:  # else they follow each draw
        step.tuner.setups.place(step.tuner.initial)
    run = _Draws.of(idata, model, step, n_draws)
    shape = run.shape
    values: dict[str, np.ndarray] = {}
    with CustomProgress(disable=not progressbar) as bar:
        task = bar.add_task("Recovering effects", total=shape[0] * shape[1])
        for at in np.ndindex(shape):
            drawn = _effects_of_draw(step, marginal, run.point(at), rng, wanted_groups)
            for name, x in drawn.items():
                values.setdefault(name, np.empty((*shape, *x.shape)))[at] = x
            bar.update(task, advance=1)
    effects = _as_variables(values, model, run.flat(), wanted_groups, marginal)
    return _with_labels(run.thinned, effects, model, wanted_groups, marginal)


def _checked_run(idata: Any, step: Any, model: Any) -> tuple[Any, MinibatchGradient]:
    """Return the model, and the step's gradient, of a result and its step."""
    if not hasattr(step, "tuner") or not hasattr(idata, "posterior"):
        raise TypeError(
            f"recover_effects({type(idata).__name__}, {type(step).__name__}): the first must be "
            "what pm.sample gave back, as a whole, the second the step with marginalize; of "
            "several steps, that one."
        )
    try:
        return modelcontext(None) if model is None else model, step.tuner.gradient
    except TypeError:
        words = "recover_effects: call it within `with model:`, or pass model=."
        raise TypeError(words) from None


class _Draws:
    """Draws of a posterior, and the points of PyMC's unconstrained scale that they are."""

    def __init__(
        self, thinned: xr.Dataset, model: Model, values: Sequence[pt.TensorVariable]
    ) -> None:
        self.thinned = thinned
        self.shape = (thinned.sizes["chain"], thinned.sizes["draw"])
        self._values = values
        self._rvs = [model.values_to_rvs[value] for value in values]
        transforms = [model.rvs_to_transforms[rv] for rv in self._rvs]
        forward = [
            rv if transform is None else transform.forward(rv, *rv.owner.inputs)
            for rv, transform in zip(self._rvs, transforms, strict=True)
        ]
        self._unconstrained = compile(
            self._rvs, forward, mode="FAST_COMPILE", on_unused_input="ignore"
        )
        self._draws = [
            thinned[rv.name].transpose("chain", "draw", ...).to_numpy() for rv in self._rvs
        ]

    @classmethod
    def of(cls, idata: Any, model: Model, step: Any, n_draws: int) -> Self:
        """Take draws, evenly spread, of all parameters on which the effects depend."""
        posterior = idata.posterior
        posterior = posterior.to_dataset() if hasattr(posterior, "to_dataset") else posterior
        others = (name for name, _ in step.tuner.gradient.density.given_types)
        names = {*step.unknowns.names, *others}
        values = [v for v in model.value_vars if v.name in names]
        rvs = [model.values_to_rvs[value] for value in values]
        if missing := [rv.name for rv in rvs if rv.name not in posterior]:
            raise ValueError(
                f"recover_effects: the posterior has no draws of {quoted(missing)}, of which "
                "effects depend. Leave out var_names= in pm.sample, or name them."
            )
        n = posterior.sizes["draw"]
        spread = np.unique(np.linspace(0, n - 1, min(n, n_draws)).astype(int))
        return cls(posterior.isel(draw=spread), model, values)

    def point(self, at: tuple[int, ...]) -> dict[str, Array]:
        """Return the values, on the unconstrained scale, of one draw."""
        draws = zip(self._draws, self._rvs, strict=True)
        values = self._unconstrained(*(x[at].astype(rv.dtype) for x, rv in draws))
        return {v.name: x for v, x in zip(self._values, values, strict=True)}

    def flat(self) -> dict[pt.TensorVariable, Array]:
        """Return the draws of each random variable, chain after chain."""
        return {
            rv: x.reshape(-1, *x.shape[2:]).astype(rv.dtype)
            for x, rv in zip(self._draws, self._rvs, strict=True)
        }


def _effects_of_draw(
    step: Any,
    marginal: Marginal,
    point: Mapping[str, Array],
    rng: np.random.Generator,
    wanted_groups: Array | None,
) -> dict[str, Array]:
    """Draw the effects, or those of some groups, given the point of one draw."""
    gradient = step.tuner.gradient
    density = gradient.density
    density.condition_on(point)
    position = density.from_model(step.unknowns.ravel(point))
    step.tuner.setups.follow(position)
    drawn = marginal.draw(gradient, position, rng, groups=wanted_groups).values
    if wanted_groups is None:
        return drawn
    return {name: np.take(x, wanted_groups, marginal.axes[name]) for name, x in drawn.items()}


def _with_labels(
    thinned: xr.Dataset,
    effects: Mapping[str, xr.DataArray],
    model: Model,
    wanted_groups: Array | None,
    marginal: Marginal,
) -> xr.Dataset:
    """Add effects to the draws, with the coordinates that pm.sample gives them."""
    by_value = {value.name: rv.name for value, rv in model.values_to_rvs.items()}
    group_dims = {effects[by_value[value]].dims[2 + axis] for value, axis in marginal.axes.items()}
    if wanted_groups is not None:
        thinned = thinned.drop_dims(group_dims, errors="ignore")
    result = thinned.assign(effects)
    labels = {}
    for effect in effects.values():
        for dim in effect.dims[2:]:
            entries = wanted_groups if dim in group_dims else None
            labels[dim] = _labels(model, dim, result.sizes[dim], entries)
    return result.assign_coords(labels)


def _labels(model: Model, dim: Hashable, length: int, entries: np.ndarray | None) -> np.ndarray:
    """Return the coordinate of a dim, as pm.sample gives it, or those of its ``entries`` alone.

    PyMC 5 compares it with the model's before it predicts, and draws effects anew where it differs.
    """
    labels = model.coords.get(dim)
    if labels is None:
        return np.arange(length) if entries is None else entries
    labels = np.asarray(labels)
    return labels if entries is None else labels[entries]


def _checked(groups: ArrayLike | None, n_groups: int) -> Array | None:
    """Return numbers of groups as an array, or None."""
    if groups is None:
        return None
    numbers = np.atleast_1d(groups)
    if numbers.dtype.kind not in "iu" or numbers.ndim > 1 or not numbers.size:
        raise ValueError(
            f"recover_effects: groups={groups!r} aren't numbers of groups. Give whole numbers from "
            f"0 to {n_groups - 1}, as rows have them, also where the dim has labels."
        )
    if np.unique(numbers).size < numbers.size:
        raise ValueError(f"recover_effects: groups={groups!r} names one twice. Give each once.")
    if numbers.min() < 0 or numbers.max() >= n_groups:
        raise ValueError(
            f"recover_effects: groups are from {numbers.min()} to {numbers.max()}; give numbers "
            f"from 0 to {n_groups - 1}."
        )
    return numbers


def _as_variables(
    found: Mapping[str, Array],
    model: Model,
    of_draws: Mapping[pt.TensorVariable, Array],
    of_groups: Array | None,
    marginal: Marginal,
) -> dict[str, xr.DataArray]:
    """Return values of random variables from those on the unconstrained scale, with their dims.

    The bounds of a transform may depend on other unknowns, and are taken at the same draw; and on
    the group, so that it is given all groups.
    """

    def whole(back: Callable[..., Array], name: str, one: Array, *others: Array) -> Array:
        if of_groups is None:
            return back(one, *others)
        axis = marginal.axes[name]
        every = marginal.nothing[name].copy()
        every[(slice(None),) * axis + (of_groups,)] = one
        return np.take(back(every, *others), of_groups, axis)

    out = {}
    for value in model.value_vars:
        if value.name not in found:
            continue
        rv = model.values_to_rvs[value]
        x = found[value.name]
        transform = model.rvs_to_transforms[rv]
        if transform is not None:
            others = {other: draws for other, draws in of_draws.items() if other is not rv}
            back = compile(
                [value, *others],
                transform.backward(value, *rv.owner.inputs),
                mode="FAST_COMPILE",
                on_unused_input="ignore",
            )
            flat = zip(x.reshape(-1, *x.shape[2:]), *others.values(), strict=True)
            x = np.array([whole(back, value.name, *one) for one in flat]).reshape(x.shape)
        names = model.named_vars_to_dims.get(rv.name) or [None] * (x.ndim - 2)
        dims = [d or f"{rv.name}_dim_{i}" for i, d in enumerate(names)]
        out[rv.name] = xr.DataArray(x, dims=("chain", "draw", *dims))
    return out
