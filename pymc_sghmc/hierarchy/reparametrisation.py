"""The log-density in coordinates in which effects are centred in part, with the Jacobian.

An effect u of unknown scale τ makes a funnel with it where the rows say little of u (Neal), and z =
u/τ makes a ridge where they say much. Between the two lies a = uτ^(λ−1), with λ from 0 to 1 for
each effect (Papaspiliopoulos, Roberts & Sköld 2007; Gorinova, Moore & Hoffman 2020). Whatever form
a model has, its log-density is written in a here; λ is an input of the graph. Knows graphs and
effects that were found in them, no data and no way of choosing λ.
"""

import math

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace

from pymc_sghmc.hierarchy.scaled_effects import ScaledEffect
from pymc_sghmc.models.unknowns import Unknowns

__all__ = ["Reparametrised", "reparametrised"]


class Reparametrised(NamedTuple):
    """Graphs in the coordinates a, and the change of coordinates with them."""

    graphs: list[pt.TensorVariable]  # those that were given
    variables: list[pt.TensorVariable]  # in place of the model's, with the same names
    log_jacobian: pt.TensorVariable  # of the change of coordinates
    to_model: pt.TensorVariable  # the model's variables, raveled and joined, of the new ones
    from_model: pt.TensorVariable  # the reverse, as a graph of the model's variables


def reparametrised(
    effects: Sequence[ScaledEffect],
    graphs: Sequence[pt.TensorVariable],
    unknowns: Unknowns,
    centring: pt.TensorVariable,
) -> Reparametrised:
    """Write graphs in the coordinates a, and the change of coordinates with them.

    With e = λ₀ − λ, λ₀ of the model's form, a value of the model's is μ + τᵉ(a − λμ), and μ = 0
    where effects are multiplied by their scale. Where they are multiplied by a factor C, they are
    C⁻¹u with u = τ^(1−λ)a, and rows see u.

    Parameters
    ----------
    effects : list of ScaledEffect
    graphs : list of TensorVariable
        In the model's variables.
    unknowns : Unknowns
    centring : TensorVariable
        λ of the entries of all effects, raveled and joined, (n,).
    """
    start = 0
    changes = {}
    new = {}
    jacobian = pt.zeros(())
    inverse = {}
    shapes = dict(zip(unknowns.names, unknowns.shapes, strict=True))
    products = {}  # with a factor, in place of which the rows see the effects themselves
    for effect in effects:
        shape = shapes[effect.value.name]
        stop = start + math.prod(shape)
        weight = centring[start:stop].reshape(shape)
        start = stop
        a = effect.value.type(name=effect.value.name)
        exponent = (effect.written if effect.mixing is None else 1.0) - weight
        # exp and log, whose derivatives are at hand, take a third of the time of powers
        log_power = exponent * pt.log(effect.scale)
        # broadcast, so that each entry counts once where a scale is shared
        jacobian = jacobian + pt.broadcast_to(log_power, shape).sum()
        value = effect.location + pt.exp(log_power) * (a - weight * effect.location)
        seen = effect.value
        if effect.mixing is not None:
            C: Any = effect.mixing.factor
            mixing = effect.mixing
            u = effect.value.type()
            for product, view in mixing.products:
                products[product] = clone_replace(view, {effect.value: u}, rebuild_strict=False)
            changes[u] = value
            value = mixing.along(lambda x, C=C: pt.linalg.solve_triangular(C, x, lower=True), value)
            seen = mixing.along(lambda x, C=C: C @ x, effect.value)
            entries = pt.broadcast_to(mixing.over(pt.log(pt.diagonal(C))), shape)
            jacobian = jacobian - entries.sum()
        changes[effect.value] = value.astype(effect.value.dtype)
        new[effect.value] = a
        back = weight * effect.location + pt.exp(-log_power) * (seen - effect.location)
        inverse[effect.value] = back.astype(effect.value.dtype)
    joined = pt.concatenate([v.ravel() for v in unknowns.variables])
    from_model = pt.concatenate([inverse.get(v, v).ravel() for v in unknowns.variables])
    outputs = [*graphs, jacobian, joined]
    if products:
        outputs = clone_replace(outputs, products, rebuild_strict=False)
    for value, expression in changes.items():
        outputs = clone_replace(outputs, {value: expression}, rebuild_strict=False)
    *graphs, jacobian, to_model = outputs
    return Reparametrised(
        graphs=graphs,
        variables=[new.get(v, v) for v in unknowns.variables],
        log_jacobian=jacobian,
        to_model=to_model,
        from_model=from_model,
    )
