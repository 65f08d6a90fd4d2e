"""The log-density in coordinates in which effects are centred in part, with the Jacobian.

An effect u of unknown scale τ makes a funnel with it where the rows say little of u (Neal), and z =
u/τ makes a ridge where they say much. If the likelihood of u is about Gaussian, with precision h
and b = h times its mean, then u given τ is Gaussian with precision h + 1/τ², and has the coordinate
a = (u − its mean) / its sd there, which is N(0, 1) whatever τ is. Where rows see the sum of effects
and of those of larger groups, b is b − ku' with the effect u' of the larger group: then all of them
are N(0, 1) together. In the same way b falls with parameters that all groups share, such as an
intercept, which is known less well than what rows see of it and an effect together. A λ that is
given instead stands for a = uτ^(λ−1), between the two forms (Papaspiliopoulos, Roberts & Sköld
2007; Gorinova, Moore & Hoffman 2020). Correlated coefficients of a group, of covariance CCᵀ, have
coordinates together: given the rows their precision is diag(h) + (CCᵀ)⁻¹. By themselves they would
be in a funnel with their correlation. And where a prior is a Student t, a lies in coordinates
without its tail, see `heavy_tails`. Whatever form a model has, its log-density is written in a
here; h, b and λ are inputs of the graph. Knows graphs and effects that were found in them, no data
and no way of choosing these.
"""

import itertools
import math

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc.model import Model
from pytensor.graph.replace import clone_replace

from pymc_sghmc.hierarchy.correlated_effects import Coefficients, StandardCoefficients, Unmixed
from pymc_sghmc.hierarchy.heavy_tails import shrunk, stretched, tail
from pymc_sghmc.hierarchy.packed_factors import PackedFactor
from pymc_sghmc.hierarchy.scaled_effects import ScaledEffect
from pymc_sghmc.models.unknowns import Unknowns

__all__ = ["Centring", "Reparametrised", "pairs", "reparametrised", "shared_variables"]

MOST_SHARED = 200  # entries of a variable that groups share
MOST_TOGETHER = 12  # coefficients of a group: a draw's time grows with their third power


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
    # of `shared_variables`, raveled and joined: numbers of entries with which b falls, (m,), ...
    columns: pt.TensorVariable
    by_shared: pt.TensorVariable  # ... and by how much, (n, m)
    # 1 where coordinates have no tails and no correlation of a prior, 0 where they have, as with λ
    whole: pt.TensorVariable


class _Coordinates(NamedTuple):
    """Of the entries of one effect, in its shape."""

    weights: Any
    information: Any
    pull: Any
    whole: Any


def pairs(effects: Sequence[ScaledEffect]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of two effects each, the second of which may be that of larger groups."""
    for i, j in itertools.combinations(range(len(effects)), 2):
        if effects[j].mixing is None:
            yield i, j


def shared_variables(
    model: Model, effects: Sequence[ScaledEffect], unknowns: Unknowns
) -> list[pt.TensorVariable]:
    """Return variables that rows may see as they see effects: on the real line, and no effects."""
    of_effects = {effect.value for effect in effects}
    found = []
    for variable, shape in zip(unknowns.variables, unknowns.shapes, strict=True):
        rv = model.values_to_rvs.get(variable)
        is_real = rv is not None and model.rvs_to_transforms[rv] is None
        if is_real and variable not in of_effects and math.prod(shape) <= MOST_SHARED:
            found.append(variable)
    return found


def reparametrised(
    effects: Sequence[ScaledEffect],
    factors: Sequence[PackedFactor],
    graphs: Sequence[pt.TensorVariable],
    unknowns: Unknowns,
    shared: Sequence[pt.TensorVariable],
    centring: Centring,
) -> Reparametrised:
    """Write graphs in the coordinates a, and the change of coordinates with them.

    Where effects are multiplied by a factor C, they are C⁻¹u, and rows see u.

    Parameters
    ----------
    effects : list of ScaledEffect
    factors : list of PackedFactor
        Of covariances, which effects may depend on.
    graphs : list of TensorVariable
        In the model's variables.
    unknowns : Unknowns
    shared : list of TensorVariable
        Variables of the model on which effects' coordinates may depend, see `shared_variables`.
    centring : Centring
    """
    changes = {}
    new = {}
    jacobian = pt.zeros(())
    inverse = {}
    shapes = dict(zip(unknowns.names, unknowns.shapes, strict=True))
    effects_seen = {}
    # products with a factor, for which the rows see the effects themselves, or with its inverse
    products = {}
    of_effects = _coordinates(effects, unknowns, shared, centring)
    for effect, coordinates in zip(effects, of_effects, strict=True):
        shape = shapes[effect.value.name]
        a = effect.value.type(name=effect.value.name)
        change = _change(effect, a, shape, coordinates)
        jacobian = jacobian + change.log_jacobian
        effects_seen[effect.value] = change.effect
        if effect.mixing is not None or effect.comes_to_zero:
            u = effect.value.type()
            for product, view in effect.products:
                products[product] = clone_replace(view, {effect.value: u}, rebuild_strict=False)
            changes[u] = change.effect.astype(u.dtype)
        if effect.independent is not None and change.independent is not None:
            v = effect.value.type()
            products[effect.independent] = v
            changes[v] = change.independent.astype(v.dtype)
        changes[effect.value] = change.value.astype(effect.value.dtype)
        new[effect.value] = a
        inverse[effect.value] = change.back.astype(effect.value.dtype)
    for factor in factors:
        coordinates = factor.value.type(name=factor.value.name)
        written = factor.written(coordinates, centring.whole)
        jacobian = jacobian + written.log_jacobian
        changes[factor.value] = written.value.astype(factor.value.dtype)
        new[factor.value] = coordinates
        inverse[factor.value] = written.back.astype(factor.value.dtype)
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
    effects: Sequence[ScaledEffect],
    unknowns: Unknowns,
    shared: Sequence[pt.TensorVariable],
    centring: Centring,
) -> list[_Coordinates]:
    """Return the inputs of each effect, in its shape, with b less what others have in its place."""
    shapes = dict(zip(unknowns.names, unknowns.shapes, strict=True))
    left = centring.pull
    if shared:
        joined = pt.concatenate([v.ravel() for v in shared])
        # no product of matrices, which takes seconds to compile
        left = left - (centring.by_shared * joined[centring.columns]).sum(axis=1)
    ends = np.cumsum([math.prod(shapes[effect.value.name]) for effect in effects])
    found = []
    for effect, end in zip(effects, ends, strict=True):
        shape = shapes[effect.value.name]
        own = slice(end - math.prod(shape), end)
        parts = (centring.weights[own], centring.information[own], left[own])
        weights, information, pull = (part.reshape(shape) for part in parts)
        found.append(_Coordinates(weights, information, pull, centring.whole))
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
    """An effect in its coordinate a."""

    value: Any  # the model's variable
    effect: Any  # u, which rows see
    log_jacobian: Any  # of the variable by a, summed over all entries
    back: Any  # a, as a graph of the model's variables
    independent: Any = None  # C⁻¹(u − μ), where coefficients have a covariance CCᵀ


def _change(
    effect: ScaledEffect, a: pt.TensorVariable, shape: tuple[int, ...], coordinates: _Coordinates
) -> _Change:
    """Write an effect in its coordinate a."""
    if effect.mixing is not None and shape[effect.mixing.axis] <= MOST_TOGETHER:
        return _together(effect, a, effect.mixing.factor, effect.mixing.axis, shape, coordinates)
    if effect.factor is not None and shape[1] <= MOST_TOGETHER:
        return _together(effect, a, effect.factor, 1, shape, coordinates)
    return _by_entry(effect, a, shape, coordinates)


def _by_entry(
    effect: ScaledEffect, a: pt.TensorVariable, shape: tuple[int, ...], coordinates: _Coordinates
) -> _Change:
    """Write entries of an effect one by one.

    u = w (μ + τ²b) + √w τ^(1−λ) S(a − λμ) with w = 1/(1 + hτ²), and u/τ where effects are
    multiplied by their scale.
    """
    is_divided = effect.mixing is None and not effect.written  # by its scale
    # exp and log, whose derivatives are at hand, take a third of the time of powers
    log_scale = effect.log_scale
    ratio = coordinates.information * pt.exp(2 * log_scale)
    more = pt.log1p(ratio)  # −log w
    powers = (0.0 if is_divided else 1.0) - coordinates.weights
    pulled = pt.exp((1.0 if is_divided else 2.0) * log_scale) * coordinates.pull
    middle = pt.exp(-more) * (effect.location + pulled)
    log_spread = powers * log_scale - 0.5 * more
    shift = coordinates.weights * effect.location
    has_tail = effect.freedom is not None and effect.mixing is None
    of_tail = coordinates.whole * tail(effect.freedom, ratio) if has_tail else None
    standard = a - shift
    log_slope = log_spread
    if of_tail is not None:
        without_tail = stretched(standard, of_tail)
        standard = without_tail.value
        log_slope = log_slope + without_tail.log_slope
    value = middle + pt.exp(log_spread) * standard
    # broadcast, so that each entry counts once where a scale is shared
    log_jacobian = pt.broadcast_to(log_slope, shape).sum()
    scale = pt.exp(log_scale) if effect.comes_to_zero else effect.scale
    u = scale * value if is_divided else value
    seen = effect.value
    mixing = effect.mixing
    if mixing is not None:
        C = mixing.factor
        value = mixing.along(lambda x: pt.linalg.solve_triangular(C, x, lower=True), value)
        seen = mixing.along(lambda x: C @ x, effect.value)
        entries = pt.broadcast_to(mixing.over(pt.log(pt.diagonal(C))), shape)
        log_jacobian = log_jacobian - entries.sum()
    back = pt.exp(-log_spread) * (seen - middle)
    if of_tail is not None:
        back = shrunk(back, of_tail)
    return _Change(value=value, effect=u, log_jacobian=log_jacobian, back=shift + back)


def _together(
    effect: ScaledEffect,
    a: pt.TensorVariable,
    C: Any,
    axis: int,
    shape: tuple[int, ...],
    coordinates: _Coordinates,
) -> _Change:
    """Write the correlated coefficients of each group together.

    u = μ + Cv, where coordinates are by the rows, with v of S(a) as in `correlated_effects`. With a
    given λ v is a, and u = μ + τ^(1−λ)(a − λμ).
    """

    def by_group(x: Any) -> Any:
        """Return a row for each group."""
        entries = pt.broadcast_to(x, shape)
        return entries.T if axis == 0 else entries

    def as_effects(x: Any) -> Any:
        return x.T if axis == 0 else x

    whole = coordinates.whole
    location = by_group(effect.location)
    weights = by_group(coordinates.weights)
    information = by_group(coordinates.information)
    force = by_group(coordinates.pull) - information * location
    squares = pt.square(C)
    standard = by_group(a)
    log_jacobian: Any = 0.0
    of_tail = None
    if effect.freedom is not None:
        ratios = (information[:, :, None] * squares).sum(axis=1)
        of_tail = whole * tail(by_group(effect.freedom), ratios)
        without_tail = stretched(standard, of_tail)
        standard = without_tail.value
        log_jacobian = without_tail.log_slope.sum()
    v, mixed, log_slopes = Coefficients()(standard, C, information, force)
    units = pt.exp((1 - weights) * 0.5 * pt.log(squares.sum(axis=1)))  # by λ
    shifts = weights * location
    given = units * (v - shifts)  # u − μ with a given λ
    value = as_effects(location + whole * mixed + (1 - whole) * given)
    diagonal = whole * pt.diagonal(C) + (1 - whole) * units
    log_jacobian = log_jacobian + log_slopes.sum() + pt.log(diagonal).sum()
    u = value
    independent = as_effects(whole * v + (1 - whole) * Unmixed()(given, C))  # C⁻¹(u − μ)
    seen = by_group(effect.value)
    if effect.mixing is not None:
        value = independent
        log_jacobian = log_jacobian - shape[1 - axis] * pt.log(pt.diagonal(C)).sum()
        seen = (C * seen[:, None, :]).sum(axis=2)
    moved = seen - location
    own = whole * Unmixed()(moved, C) + (1 - whole) * (moved / units + shifts)
    back = StandardCoefficients()(own, C, information, force)
    if of_tail is not None:
        back = shrunk(back, of_tail)
    return _Change(
        value=value,
        effect=u,
        log_jacobian=log_jacobian,
        back=as_effects(back),
        independent=independent,
    )
