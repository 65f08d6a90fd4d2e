"""A Gaussian on the unconstrained scale of a model's parameters, and a model that has it as prior.

Knows PyMC models; no draws, no step methods.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc.model import Model
from pymc.model.fgraph import fgraph_from_model, model_from_fgraph

from pymc_sghmc.checks import quoted
from pymc_sghmc.protocols import Array
from pymc_sghmc.updating.normal_blocks import Transformed, conditional_blocks

__all__ = ["GaussianPrior", "Parameter", "refuse_imputed_values"]

SAME = 1e-5  # relative difference of a transform from the run's, above which it is another one


@dataclass(frozen=True)
class Parameter:
    """A parameter of the run, and where it lies in a position.

    Attributes
    ----------
    name : str
        Of the random variable.
    shape : tuple of int
        On the unconstrained scale.
    place : slice
        Of its entries in a position.
    value : array
        On the model's own scale, at the Gaussian's mean.
    """

    name: str
    shape: tuple[int, ...]
    place: slice
    value: Array


@dataclass(frozen=True, repr=False)
class GaussianPrior:
    """A Gaussian that stands for the posterior of a run, to be the prior of the next one.

    `prior_from` makes it. It holds plain NumPy arrays, so that it can be pickled and kept until new
    data come.

    Attributes
    ----------
    parameters : tuple of Parameter
        Names and shapes, in the order of a position.
    mean : array of shape (d,)
        On the unconstrained scale, where a positive parameter is its logarithm.
    covariance : array of shape (d, d)
        Inverse of the Hessian of −log p at the mean.
    """

    parameters: tuple[Parameter, ...]
    mean: Array
    covariance: Array

    def __repr__(self) -> str:
        shown = [p.name + (str(list(p.value.shape)) if p.value.shape else "") for p in self]
        return f"<GaussianPrior of {self.mean.size} parameters: {', '.join(shown)}>"

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    def apply(self, model: Model) -> Model:
        """Return a copy of a model in which this Gaussian is the prior of all parameters.

        As ``pm.do`` does, it leaves the model that it is given as it is. Names, shapes, dims,
        coords, transforms, data, likelihoods and deterministics stay. Only the distributions of the
        free variables change: each is now Gaussian on the unconstrained scale, given those before
        it. ``pm.sample`` with any step, ``pm.set_data`` and prior predictive draws work on it.

        Parameters
        ----------
        model : pm.Model
            With the parameters of the run: its own model, or one that was built anew on new data.

        Returns
        -------
        pm.Model
            With a copy of what its ``pm.Data`` hold, as with ``pm.do``.

        Raises
        ------
        ValueError
            If the parameters differ from those of the run in name, shape or transform, or if the
            model has a ``pm.Potential``: it may be a part of the old prior, which the Gaussian
            holds already.
        """
        self._refuse_other_parameters(model)
        with _without_initial_values(model):
            graph, copies = fgraph_from_model(model)
        blocks = conditional_blocks(self.mean, self.covariance, [p.place for p in self])
        new_transforms = {}
        before: list[Any] = []  # unconstrained parameters, as vectors
        for parameter, block in zip(self, blocks, strict=True):
            rv = model[parameter.name]
            transformed = Transformed(rv, model.rvs_to_transforms[rv], parameter.shape)
            node = copies[rv].owner
            new = transformed.distribution(block, before)
            graph.change_node_input(node, 0, new, import_missing=True)
            new_transforms[parameter.name] = transformed.transform
            before.append(transformed.unconstrained(copies[rv]))
        new_model = model_from_fgraph(graph, mutate_fgraph=True)
        for name, transform in new_transforms.items():
            new_model.rvs_to_transforms[new_model[name]] = transform
        return new_model

    def _refuse_other_parameters(self, model: Model) -> None:
        """Refuse a model whose parameters aren't those of the run."""
        if not isinstance(model, Model):
            raise TypeError(
                f"apply(model={type(model).__name__}): model must be a PyMC model. With Bambi pass "
                "model.backend.model."
            )
        refuse_imputed_values(model, "apply")
        names = {parameter.name for parameter in self}
        new = [rv.name for rv in model.free_RVs if rv.name not in names]
        gone = sorted(names - {rv.name for rv in model.free_RVs})
        if new or gone:
            raise ValueError(
                "apply: the model needs the parameters of the run that the prior comes from. "
                + (f"The run has no {quoted(new)}. " if new else "")
                + (f"The model has no {quoted(gone)}. " if gone else "")
                + "Build the model with the same free variables."
            )
        if model.potentials:
            raise ValueError(
                f"apply: the model has {quoted([p.name for p in model.potentials])}, made by "
                "pm.Potential. If that is a part of the old prior, leave it out: the posterior of "
                "the run has it already. If it is a likelihood, write it as an observed variable, "
                "such as pm.CustomDist(..., observed=y)."
            )
        _refuse_other_scales(model, self.parameters, self.mean)


def _refuse_other_scales(model: Model, parameters: tuple[Parameter, ...], mean: Array) -> None:
    """Refuse parameters of another shape, or with another transform, than in the run."""
    point = model.initial_point()
    for parameter in parameters:
        rv = model[parameter.name]
        shape = np.shape(point[model.rvs_to_values[rv].name])
        if shape != parameter.shape:
            raise ValueError(
                f"apply: {parameter.name!r} has the unconstrained shape {shape} in the model, and "
                f"{parameter.shape} in the run that the prior comes from. The run says nothing of "
                "new entries, such as new groups: build the model with the coords of the run."
            )
        transform = model.rvs_to_transforms[rv]
        there = Transformed(rv, transform, shape).forward_of(parameter.value)
        if not np.allclose(there.ravel(), mean[parameter.place], rtol=SAME, atol=SAME):
            raise ValueError(
                f"apply: {parameter.name!r} has another transform in the model than in the run "
                "that the prior comes from. Give it the same distribution, with the same bounds."
            )


def refuse_imputed_values(model: Model, caller: str) -> None:
    """Refuse missing data that PyMC samples as parameters: they are one run's own.

    Parameters
    ----------
    model : pm.Model
    caller : str
        Name of the function, for messages.
    """
    observed = {rv.name for rv in model.observed_RVs}
    imputed = [
        rv.name
        for rv in model.free_RVs
        if rv.name.endswith("_unobserved")
        and rv.name.removesuffix("_unobserved") + "_observed" in observed
    ]
    if imputed:
        raise ValueError(
            f"{caller}: {quoted(imputed)} are missing values of the data, which are sampled as "
            "parameters, and other data have others. Leave out the rows with missing values."
        )


@contextmanager
def _without_initial_values(model: Model) -> Iterator[None]:
    """Take a model's initial values away for a while: PyMC copies no model that has any.

    The Gaussian's mean takes their place.
    """
    initial_values: Mapping[Any, Any] = model.rvs_to_initial_values
    model.rvs_to_initial_values = dict.fromkeys(initial_values)
    try:
        yield
    finally:
        model.rvs_to_initial_values = initial_values
