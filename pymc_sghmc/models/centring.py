"""Effects and their scales: coordinates in which groups of few and of many rows are alike easy.

An effect u of unknown scale τ makes a funnel with it where the rows say little of u (Neal), and z = u/τ
makes a ridge where they say much. Between the two lies a = uτ^(λ−1), with λ from 0 to 1 for each effect
(Papaspiliopoulos, Roberts & Sköld 2007; Gorinova, Moore & Hoffman 2020). Whatever form a model has, its
log-density is written in a here, with the Jacobian; λ is an input of the graph. Knows models and graphs,
no data and no way of choosing λ.
"""

import math

from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc.pytensorf import compile
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import AdvancedSubtensor

from pymc_sghmc.compat import ancestors, indexes_leading_axes, toposort

__all__ = ["Effects", "effects", "written_in"]

LOCATION_AND_SCALE = tuple(
    type(kind.rv_op) for kind in (pm.Normal, pm.StudentT, pm.Laplace, pm.Cauchy, pm.Logistic)
)
SIZES = (0.1, 1.0, 1.0, 3.0, 3.0, 10.0)  # of unknowns at which a scale has to be above zero


class Effects(NamedTuple):
    """An unknown of the model with several entries, and what scales them."""

    value: Any  # the model's variable
    location: Any  # μ, broadcastable to its shape
    scale: Any  # τ, in the model's variables, broadcastable to its shape
    written: float  # λ of the form in which the model is written: 1 as u ~ N(μ, τ), 0 as τz

    @property
    def needs(self) -> list:
        """What location and scale are computed from."""
        return [self.location, self.scale]


def effects(model, terms, unknowns) -> list:
    """Find the effects among ``unknowns`` whose scale depends on others of them.

    Two forms are known: priors of effects whose scale is unknown, such as ``Normal(mu, tau)`` or
    ``MvNormal(mu, chol=...)``, and effects of fixed scale of which the rows see nothing but their
    product with an unknown scale. They are ordered so that none is needed by a later one.

    Parameters
    ----------
    model : pm.Model
    terms : list of TensorVariable
        Log-likelihoods of rows, in the model's variables.
    unknowns : Unknowns
        Of a step.
    """
    found, variables = [], unknowns.variables
    for rv in model.free_RVs:
        value = model.rvs_to_values[rv]
        if value not in variables or value.type.ndim == 0:
            continue
        forms = _as_prior(model, rv, value), _as_product(model, rv, value, terms)
        known = [one for one in forms if one is not None and _is_known(one, variables)]
        found += [one for one in known if _is_positive(one, unknowns)][:1]
    by_value = {one.value: one for one in found}
    needs = {
        one.value: [v for v in ancestors(one.needs) if v in by_value and v is not one.value]
        for one in found
    }
    try:  # those on which others depend come last
        order = list(TopologicalSorter(needs).static_order())[::-1]
    except CycleError:
        return []
    return [by_value[value] for value in order]


def written_in(found, graphs, unknowns, centring) -> tuple:
    """Write graphs in the coordinates a, and the change of coordinates with them.

    With e = λ₀ − λ, λ₀ of the model's form, a value of the model's is μ + τᵉ(a − λμ), and μ = 0 where
    effects are multiplied by their scale.

    Parameters
    ----------
    found : list of Effects
    graphs : list of TensorVariable
        In the model's variables.
    unknowns : Unknowns
    centring : TensorVariable
        λ of the entries of all effects, raveled and joined, (n,).

    Returns
    -------
    graphs : list of TensorVariable
    variables : list of TensorVariable
        In place of the model's, with the same names.
    log_jacobian : TensorVariable
        Of the change of coordinates.
    to_model : TensorVariable
        Values of the model's variables, raveled and joined, as graph of the new variables.
    from_model : TensorVariable
        The reverse, as a graph of the model's variables.
    """
    start, changes, jacobian, inverse = 0, {}, pt.zeros(()), {}
    variables, shapes = unknowns.variables, _shapes(unknowns)
    for one in found:
        shape = shapes[one.value.name]
        stop = start + math.prod(shape)
        weight, start = centring[start:stop].reshape(shape), stop
        exponent = one.written - weight
        a = one.value.type(name=one.value.name)
        # broadcast, so that each entry counts once where a scale is shared
        jacobian = jacobian + pt.broadcast_to(exponent * pt.log(one.scale), shape).sum()
        value = one.location + one.scale**exponent * (a - weight * one.location)
        changes[one.value] = a, value.astype(one.value.dtype)
        back = weight * one.location + one.scale ** (-exponent) * (one.value - one.location)
        inverse[one.value] = back.astype(one.value.dtype)
    joined = pt.concatenate([v.ravel() for v in variables])
    from_model = pt.concatenate([inverse.get(v, v).ravel() for v in variables])
    outputs = [*graphs, jacobian, joined]
    for value, (_, expression) in changes.items():
        outputs = clone_replace(outputs, {value: expression}, rebuild_strict=False)
    *graphs, jacobian, to_model = outputs
    new = [changes[v][0] if v in changes else v for v in variables]
    return graphs, new, jacobian, to_model, from_model


def _as_prior(model, rv, value) -> Effects | None:
    """Know ``u ~ Normal(μ, τ)`` and the like, with values on the whole real line."""
    op = rv.owner.op if rv.owner is not None else None
    if not isinstance(op, RandomVariable) or model.rvs_to_transforms[rv] is not None:
        return None
    parameters = op.dist_params(rv.owner)
    if isinstance(op, LOCATION_AND_SCALE):
        location, scale = model.replace_rvs_by_values(list(parameters[-2:]))
        return Effects(value, location, scale, 1.0)
    if isinstance(op, type(pm.MvNormal.rv_op)):
        location, covariance = model.replace_rvs_by_values(list(parameters))
        variances = pt.diagonal(covariance, axis1=-2, axis2=-1)
        return Effects(value, location, pt.sqrt(variances), 1.0)
    return None


def _as_product(model, rv, value, terms) -> Effects | None:
    """Know τz: rows depend on z by way of its product with one scale alone."""
    op = rv.owner.op if rv.owner is not None else None
    known = isinstance(op, RandomVariable) and op.ndim_supp == 0
    if not known or model.rvs_to_transforms[rv] is not None:
        return None
    unknown = set(model.free_RVs)
    if any(v in unknown for v in ancestors(rv.owner.inputs)):
        return None
    scale = _scale_of(value, terms, set(model.value_vars))
    return None if scale is None else Effects(value, pt.zeros(()), scale, 0.0)


def _scale_of(value, terms, unknowns) -> Variable | None:
    """Find what ``value`` is multiplied by wherever it is used, with axes as it has itself, or None."""
    views = {value: tuple(range(value.type.ndim))}  # of each axis which of the value's it is
    moving, found = set(unknowns), {}
    for node in toposort(terms, []):
        if isinstance(node.op, Shape | Shape_i) or moving.isdisjoint(node.inputs):
            continue
        moving.update(node.outputs)
        viewed = [v for v in node.inputs if v in views]
        others = [v for v in node.inputs if v in moving and v not in views]
        if not viewed:
            continue
        if len(viewed) > 1 or len(others) > 1:
            return None
        if others and node.op == pt.mul:
            scale = _aligned(others[0], views[viewed[0]], value.type.ndim)
            found[_root(others[0])] = scale
        else:
            views[node.outputs[0]] = _axes_after(node, viewed[0], views[viewed[0]])
            if others or views[node.outputs[0]] is None:
                return None
    return next(iter(found.values())) if len(found) == 1 else None


def _root(scale):
    """One variable for all views of a scale."""
    while scale.owner is not None and isinstance(scale.owner.op, DimShuffle):
        scale = scale.owner.inputs[0]
    return scale


def _axes_after(node, view, axes) -> tuple | None:
    """Which axes of the value those of a new view are: it moves entries, or multiplies by constants."""
    op = node.op
    if isinstance(op, DimShuffle):
        return tuple(None if i == "x" else axes[i] for i in op.new_order)
    if op in (pt.mul, pt.neg, pt.tensor_copy):
        return axes
    if isinstance(op, AdvancedSubtensor) and len(node.inputs) == 2:
        if view is node.inputs[0] and indexes_leading_axes(node):
            return (*[None] * node.inputs[1].type.ndim, *axes[1:])
    return None


def _aligned(scale, axes, ndim) -> Variable | None:
    """``scale`` with the axes of the value that it multiplies a view of, or None."""
    order = ["x"] * ndim
    for place, axis in enumerate(axes):
        if scale.type.broadcastable[place]:
            continue
        if axis is None:
            return None
        order[axis] = place
    return scale.dimshuffle(order)


def _is_known(one, variables) -> bool:
    """Whether the scale is unknown, and nothing but the step's unknowns tells it and the location."""
    scale = set(ancestors([one.scale]))
    needed = scale | set(ancestors([one.location]))
    unknown = [
        v for v in needed if v.owner is None and not isinstance(v, Constant | SharedVariable)
    ]
    own = [v in variables and v is not one.value for v in unknown]
    return all(own) and not scale.isdisjoint(variables)


def _shapes(unknowns) -> dict:
    return dict(zip(unknowns.names, unknowns.shapes, strict=True))


def _is_positive(one, unknowns) -> bool:
    """Whether the scale is above zero at points of all sizes."""
    used, shapes = [v for v in ancestors([one.scale]) if v in unknowns.variables], _shapes(unknowns)
    scale = compile(used, one.scale, mode="FAST_COMPILE")
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        found = [
            scale(*(rng.normal(0, size, shapes[v.name]).astype(v.dtype) for v in used))
            for size in SIZES
        ]
    return all((values > 0).all() for values in found)
