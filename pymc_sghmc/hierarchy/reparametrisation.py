"""The log-density in coordinates in which effects are centred in part, with the Jacobian.

An effect u of unknown scale τ makes a funnel with it where the rows say little of u (Neal), and z =
u/τ makes a ridge where they say much. If the likelihood of u is about Gaussian, with precision h
and b = h times its mean, then u given τ is Gaussian with precision h + 1/τ², and has the coordinate
a = (u − its mean) / its sd there, which is N(0, 1) whatever τ is. Where rows see the sum of effects
and of those of larger groups, b is b − ku' with the effect u' of the larger group: then all of them
are N(0, 1) together. A λ that is given instead stands
for a = uτ^(λ−1), between the two forms (Papaspiliopoulos, Roberts & Sköld 2007; Gorinova, Moore &
Hoffman 2020). Whatever form a model has, its log-density is written in a here; h, b and λ are
inputs of the graph. Knows graphs and effects that were found in them, no data and no way of
choosing these.
"""

import itertools
import math

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace

from pymc_sghmc.hierarchy.scaled_effects import ScaledEffect
from pymc_sghmc.models.unknowns import Unknowns

__all__ = ["Reparametrised", "pairs", "reparametrised"]


class Reparametrised(NamedTuple):
    """Graphs in the coordinates a, and the change of coordinates with them."""

    graphs: list[pt.TensorVariable]  # those that were given
    variables: list[pt.TensorVariable]  # in place of the model's, with the same names
    log_jacobian: pt.TensorVariable  # of the change of coordinates
    to_model: pt.TensorVariable  # the model's variables, raveled and joined, of the new ones
    from_model: pt.TensorVariable  # the reverse, as a graph of the model's variables
    # parameters with the effects themselves, raveled and joined: what rows see of them
    seen: pt.TensorVariable


class Centring(NamedTuple):
    """Inputs of graphs in the coordinates a, for the entries of all effects, raveled and joined."""

    weights: pt.TensorVariable  # λ, (n,)
    information: pt.TensorVariable  # h, (n,)
    pull: pt.TensorVariable  # b, (n,)
    # for each of `pairs` of effects, for each entry of the first, raveled and joined:
    above: pt.TensorVariable  # the entry of the second that its rows see with it, ...
    coupling: pt.TensorVariable  # ... and k


class _Coordinates(NamedTuple):
    """Of the entries of one effect, in its shape."""

    weights: pt.TensorVariable
    information: pt.TensorVariable
    pull: pt.TensorVariable


def pairs(effects: Sequence[ScaledEffect]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of two effects each, the second of which may be that of larger groups."""
    for i, j in itertools.combinations(range(len(effects)), 2):
        if effects[i].mixing is None and effects[j].mixing is None:
            yield i, j


def reparametrised(
    effects: Sequence[ScaledEffect],
    graphs: Sequence[pt.TensorVariable],
    unknowns: Unknowns,
    centring: Centring,
) -> Reparametrised:
    """Write graphs in the coordinates a, and the change of coordinates with them.

    Where effects are multiplied by a factor C, they are C⁻¹u, and rows see u.

    Parameters
    ----------
    effects : list of ScaledEffect
    graphs : list of TensorVariable
        In the model's variables.
    unknowns : Unknowns
    centring : Centring
    """
    changes = {}
    new = {}
    jacobian = pt.zeros(())
    inverse = {}
    shapes = dict(zip(unknowns.names, unknowns.shapes, strict=True))
    effects_seen = {}
    products = {}  # with a factor, in place of which the rows see the effects themselves
    of_effects = _coordinates(effects, shapes, centring)
    for effect, coordinates in zip(effects, of_effects, strict=True):
        shape = shapes[effect.value.name]
        a = effect.value.type(name=effect.value.name)
        change = _change(effect, a, coordinates)
        # broadcast, so that each entry counts once where a scale is shared
        jacobian = jacobian + pt.broadcast_to(change.log_spread, shape).sum()
        value = change.value
        seen = effect.value
        effects_seen[effect.value] = change.effect
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
        back = change.shift + pt.exp(-change.log_spread) * (seen - change.middle)
        inverse[effect.value] = back.astype(effect.value.dtype)
    joined = pt.concatenate([v.ravel() for v in unknowns.variables])
    from_model = pt.concatenate([inverse.get(v, v).ravel() for v in unknowns.variables])
    rows_see = pt.concatenate([effects_seen.get(v, v).ravel() for v in unknowns.variables])
    outputs = [*graphs, jacobian, joined, rows_see]
    if products:
        outputs = clone_replace(outputs, products, rebuild_strict=False)
    for value, expression in changes.items():
        outputs = clone_replace(outputs, {value: expression}, rebuild_strict=False)
    *graphs, jacobian, to_model, rows_see = outputs
    return Reparametrised(
        graphs=graphs,
        variables=[new.get(v, v) for v in unknowns.variables],
        log_jacobian=jacobian,
        to_model=to_model,
        from_model=from_model,
        seen=rows_see,
    )


def _coordinates(
    effects: Sequence[ScaledEffect], shapes: Mapping[str, tuple[int, ...]], centring: Centring
) -> list[_Coordinates]:
    """Return the inputs of each effect, in its shape, with b − Σ ku' in the place of b."""
    ends = np.cumsum([math.prod(shapes[effect.value.name]) for effect in effects])
    found = []
    for effect, end in zip(effects, ends, strict=True):
        shape = shapes[effect.value.name]
        own = slice(end - math.prod(shape), end)
        parts = (centring.weights[own], centring.information[own], centring.pull[own])
        found.append(_Coordinates(*(part.reshape(shape) for part in parts)))
    start = 0
    for i, j in pairs(effects):
        shape = shapes[effects[i].value.name]
        part = slice(start, start + math.prod(shape))
        start = part.stop
        other = effects[j]
        u = other.value if other.written else other.scale * other.value
        entries = pt.broadcast_to(u, shapes[other.value.name]).ravel()[centring.above[part]]
        seen_with = (centring.coupling[part] * entries).reshape(shape)
        found[i] = found[i]._replace(pull=found[i].pull - seen_with)
    return found


class _Change(NamedTuple):
    """The model's value of an effect, in its coordinate a: middle + spread (a − shift)."""

    value: Any
    effect: Any  # itself, of which the value is a part where it is divided by its scale
    middle: Any
    log_spread: Any
    shift: Any


def _change(effect: ScaledEffect, a: pt.TensorVariable, centring: _Coordinates) -> _Change:
    """Write an effect in its coordinate a.

    u = w (μ + τ²b) + √w τ^(1−λ) (a − λμ) with w = 1/(1 + hτ²), and u/τ where effects are
    multiplied by their scale.
    """
    is_divided = effect.mixing is None and not effect.written  # by its scale
    # exp and log, whose derivatives are at hand, take a third of the time of powers
    log_scale = pt.log(effect.scale)
    more = pt.log1p(centring.information * pt.exp(2 * log_scale))  # −log w
    powers = (0.0 if is_divided else 1.0) - centring.weights
    pulled = pt.exp((1.0 if is_divided else 2.0) * log_scale) * centring.pull
    middle = pt.exp(-more) * (effect.location + pulled)
    log_spread = powers * log_scale - 0.5 * more
    shift = centring.weights * effect.location
    value = middle + pt.exp(log_spread) * (a - shift)
    return _Change(
        value=value,
        effect=effect.scale * value if is_divided else value,
        middle=middle,
        log_spread=log_spread,
        shift=shift,
    )
