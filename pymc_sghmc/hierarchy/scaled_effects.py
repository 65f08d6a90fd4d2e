"""Effects of unknown scale, in whatever form a model has them.

Knows models and their graphs, no data and no coordinates.
"""

import math

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import pymc as pm
import pytensor.tensor as pt

from pymc.model import Model
from pytensor.tensor.random.op import RandomVariable

from pymc_sghmc.compat import SolveTriangular, ancestors
from pymc_sghmc.hierarchy.log_scale import log_of
from pymc_sghmc.hierarchy.products import (
    Mixing,
    Product,
    are_equal,
    products,
    sign_of,
    told_by,
)
from pymc_sghmc.models.unknowns import Unknowns

__all__ = ["LOCATION_AND_SCALE", "ScaledEffect", "scaled_effects"]

LOCATION_AND_SCALE = tuple(
    type(kind.rv_op) for kind in (pm.Normal, pm.StudentT, pm.Laplace, pm.Cauchy, pm.Logistic)
)


class ScaledEffect(NamedTuple):
    """A parameter of the model with several entries, and what scales them."""

    value: Any  # the model's variable
    location: Any  # μ, broadcastable to its shape
    scale: Any  # τ, in the model's variables, broadcastable to its shape
    written: float  # λ of the form in which the model is written: 1 as u ~ N(μ, τ), 0 as τz or Cz
    mixing: Mixing | None = None  # C of the latter, with the lengths of whose rows as τ
    products: Sequence[Product] = ()  # of that form: τz in the rows' graphs, if that is known
    freedom: Any = None  # ν, broadcastable to its shape, where the prior is a Student t
    factor: Any = None  # of a prior's covariance, C as in ``mixing``, of coefficients by group
    independent: Any = None  # C⁻¹(u − μ), as the log-density of the prior has it
    comes_to_zero: bool = False  # whether τ does, by rounding, where its logarithm is known

    @property
    def log_scale(self) -> pt.TensorVariable:
        """Logarithm of τ."""
        return log_of(self.scale) if self.comes_to_zero else pt.log(self.scale)

    @property
    def needs(self) -> list[pt.TensorVariable]:
        """What location and scale are computed from."""
        return [self.location, self.scale]

    def without_unknown_freedom(self, variables: Sequence[pt.TensorVariable]) -> "ScaledEffect":
        """Return the effect without its ν if that depends on what the step doesn't sample."""
        if self.freedom is None or set(variables).issuperset(told_by([self.freedom])):
            return self
        return self._replace(freedom=None)


def scaled_effects(
    model: Model,
    terms: Sequence[pt.TensorVariable],
    log_prior: pt.TensorVariable,
    unknowns: Unknowns,
) -> list[ScaledEffect]:
    """Find the effects among ``unknowns`` whose scale depends on others of them.

    Two forms are known: priors of effects whose scale is unknown, such as ``Normal(mu, tau)`` or
    ``MvNormal(mu, chol=...)``, and effects of fixed scale of which the rows see nothing but their
    product with unknown scales, or with a triangular factor as of `LKJCholeskyCov`. They are
    ordered so that none is needed by a later one, and larger ones come first where that is so.

    Parameters
    ----------
    model : pm.Model
    terms : list of TensorVariable
        Log-likelihoods of rows, in the model's variables.
    log_prior : TensorVariable
        In the same variables.
    unknowns : Unknowns
        Of a step.
    """
    found = []
    variables = unknowns.variables
    for rv in model.free_RVs:
        value = model.rvs_to_values[rv]
        if value not in variables or value.type.ndim == 0:
            continue
        forms = (
            _as_prior(model, rv, value, log_prior, unknowns),
            _as_product(model, rv, value, terms, unknowns),
        )
        known = [one for one in forms if one is not None and _is_known(one, variables)]
        for one in known:
            sign = sign_of(one.scale, unknowns)
            if sign.is_positive:
                one = one._replace(comes_to_zero=sign.comes_to_zero)
                found.append(one.without_unknown_freedom(variables))
                break
    by_value = {one.value: one for one in found}
    needs = {
        one.value: [v for v in ancestors(one.needs) if v in by_value and v is not one.value]
        for one in found
    }
    sizes = dict(zip(unknowns.names, map(math.prod, unknowns.shapes), strict=True))
    smaller = {
        value: [v for v in by_value if sizes[v.name] < sizes[value.name]] for value in by_value
    }
    for after in ({v: [*needs[v], *smaller[v]] for v in by_value}, needs):
        try:  # those on which others depend come last
            order = list(TopologicalSorter(after).static_order())[::-1]
        except CycleError:
            continue
        return [by_value[value] for value in order]
    return []


def _as_prior(
    model: Model,
    rv: pt.TensorVariable,
    value: pt.TensorVariable,
    log_prior: pt.TensorVariable,
    unknowns: Unknowns,
) -> ScaledEffect | None:
    """Know ``u ~ Normal(μ, τ)`` and the like, with values on the whole real line."""
    op = rv.owner.op if rv.owner is not None else None
    if not isinstance(op, RandomVariable) or model.rvs_to_transforms[rv] is not None:
        return None
    parameters = op.dist_params(rv.owner)
    if isinstance(op, LOCATION_AND_SCALE):
        location, scale = model.replace_rvs_by_values(list(parameters[-2:]))
        freedom = _freedom(model, rv)
        return ScaledEffect(value, location, scale, 1.0, freedom=freedom)
    if isinstance(op, type(pm.MvNormal.rv_op)):
        location, covariance = model.replace_rvs_by_values(list(parameters))
        variances = pt.diagonal(covariance, axis1=-2, axis2=-1)
        is_shared = all(covariance.type.broadcastable[:-2])  # by all groups
        effect = ScaledEffect(value, location, pt.sqrt(variances), 1.0)
        if is_shared and value.type.ndim == 2:
            factor = pt.linalg.cholesky(covariance.reshape(covariance.shape[-2:]))
            independent = _independent(log_prior, value - location, factor, unknowns)
            effect = effect._replace(factor=factor, independent=independent)
        return effect
    return None


def _independent(
    log_prior: pt.TensorVariable, shift: Any, factor: Any, unknowns: Unknowns
) -> pt.TensorVariable | None:
    """Find C⁻¹(u − μ) in the log-density of a prior N(μ, CCᵀ), by its values."""
    wanted = pt.linalg.solve_triangular(factor, shift.T, lower=True).T
    needed = set(told_by([wanted]))
    for solved in ancestors([log_prior]):
        op = getattr(solved.owner, "op", None)
        is_solved = isinstance(getattr(op, "core_op", op), SolveTriangular)
        is_alike = is_solved and solved.type.ndim == 2 and set(told_by([solved])) == needed
        if is_alike and are_equal(solved, wanted, unknowns):
            return solved
    return None


def _freedom(model: Model, rv: pt.TensorVariable) -> Any:
    """Return ν of a Student t prior, None of another."""
    op = rv.owner.op
    if not isinstance(op, type(pm.StudentT.rv_op)):
        return None
    [freedom] = model.replace_rvs_by_values([op.dist_params(rv.owner)[0]])
    return freedom


def _as_product(
    model: Model,
    rv: pt.TensorVariable,
    value: pt.TensorVariable,
    terms: Sequence[pt.TensorVariable],
    unknowns: Unknowns,
) -> ScaledEffect | None:
    """Know τz and Cz: rows depend on z by way of its product with one scale or factor alone."""
    op = rv.owner.op if rv.owner is not None else None
    known = isinstance(op, RandomVariable) and op.ndim_supp == 0
    if not known or model.rvs_to_transforms[rv] is not None:
        return None
    unknown = set(model.free_RVs)
    if any(v in unknown for v in ancestors(rv.owner.inputs)):
        return None
    found = products(value, terms, set(model.value_vars), unknowns)
    scale = found.scale
    if found.mixing is not None:
        scale = found.mixing.over(pt.sqrt(pt.square(found.mixing.factor).sum(axis=1)))
    if scale is None:
        return None
    freedom = _freedom(model, rv)
    return ScaledEffect(value, pt.zeros(()), scale, 0.0, found.mixing, found.products, freedom)


def _is_known(one: ScaledEffect, variables: Sequence[pt.TensorVariable]) -> bool:
    """Whether the scale is a parameter, and the step samples all that determines the effect."""
    own = [v in variables and v is not one.value for v in told_by(one.needs)]
    return all(own) and not set(variables).isdisjoint(told_by([one.scale]))
