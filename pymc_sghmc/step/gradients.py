"""From a sampler's arguments to its gradients. Knows arguments and gradients, no chain."""

import logging

from collections.abc import Mapping, Sequence
from typing import Any

import pytensor.tensor as pt

from pymc.model import Model

from pymc_sghmc.checks import quoted
from pymc_sghmc.exceptions import NeedsAllRows, NotApplicable
from pymc_sghmc.gradients.around_centre import AroundExpansion
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient, minibatch_gradient
from pymc_sghmc.gradients.second_derivatives import is_straight, second_derivatives
from pymc_sghmc.gradients.second_order import second_order
from pymc_sghmc.hierarchy.centring import centring_of, not_an_effect
from pymc_sghmc.hierarchy.clustered_rows import ClusterEffect
from pymc_sghmc.hierarchy.rewrites import (
    Rewriting,
    advise_to_integrate_out,
    rewritten,
)
from pymc_sghmc.loops.backends import is_jax
from pymc_sghmc.models.bad_data import refuse_unobserved
from pymc_sghmc.models.contract import ALL_ROWS, BatchSize
from pymc_sghmc.models.graphs import array_of, data_leaves, minibatch_outputs
from pymc_sghmc.models.row_model import RowModel, row_model
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.phases import COMPILING, begin_phase, count_passes
from pymc_sghmc.rows.array_loader import ArrayLoader
from pymc_sghmc.rows.containers import Container, containers_of
from pymc_sghmc.rows.data import PoolPlan
from pymc_sghmc.rows.files import is_on_disk
from pymc_sghmc.rows.given_data import GivenData, given_data
from pymc_sghmc.rows.local_copy import local_copy
from pymc_sghmc.rows.sources import Source
from pymc_sghmc.step.warn import refuse_single_rows

__all__ = ["compile_second_derivatives", "gradients", "model_by_row", "pool_of"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

POOL_ROWS = 100_000  # of a pool that needs no more
ROWS_PER_PARAMETER = 10  # in a pool, at least
MANY_NUMBERS = 1000  # of which a potential may be computed before it is worth a line
POOL_SHARE = 0.1  # of target_bias: the error that a pool may cause in a mean, in posterior sds


def model_by_row(
    model: Model,
    unknowns: Unknowns,
    batch_size: BatchSize,
    point: Mapping[str, Any],
    data: Any,
    rewriting: Rewriting,
    pool: int | str | None = None,
) -> tuple[RowModel, Source | None]:
    """Cut a model into rows, and find what yields these if they aren't in memory.

    Parameters
    ----------
    model : pm.Model
    unknowns : Unknowns
        What a position is made of.
    batch_size, data, pool
        As documented by the samplers.
    point : dict
        A point of the model.
    rewriting : Rewriting
        Which group effects to rewrite.
    """
    if data is not None:
        refuse_unobserved(model, "data=")
        if batch_size is None:
            raise ValueError("data= holds rows for minibatches: pass a batch_size, too.")
    integrated = [effect.rv for effect in rewriting.integrated]
    elsewhere = GivenData(None)
    if data is not None:
        elsewhere = _rows_elsewhere(containers_of(model), data, pool, integrated)
    arrays, source = elsewhere
    rows = row_model(
        model, unknowns, batch_size, point, arrays, elsewhere.n_rows, tuple(integrated)
    )
    return rewritten(rows, model, rewriting), source


def _rows_elsewhere(
    containers: Mapping[str, Container],
    data: Any,
    pool: int | str | None,
    integrated: Sequence[pt.TensorVariable],
) -> GivenData:
    """Read the rows that ``data`` has, or some of them where a pool is to stand for all."""
    begin_phase("reading rows")
    arrays, source = given_data(data, containers)
    if source is None:
        assert arrays is not None
        may_be_drawn = isinstance(pool, int) or is_on_disk(arrays)
        if pool is None or integrated or not may_be_drawn:
            return GivenData(arrays)
        source = Source(ArrayLoader(arrays), containers)
        if source.n_rows <= _most_rows(source, pool):
            return GivenData(arrays)
    count_passes(1.0)
    if pool is not None and source.n_rows <= _most_rows(source, pool) and not source.dropped:
        return GivenData(source.everything())
    if integrated:
        asked_by = f"marginalize={[rv.name for rv in integrated]}"
        _log.info(
            f"{asked_by}: the rows of a group are needed together. All {source.n_rows:,} rows are "
            f"copied to a temporary folder, {source.rows_per_pass * source.row_bytes / 1e9:.2g} GB."
        )
        return GivenData(local_copy(source, asked_by))
    source.must_repeat = pool is not None
    return GivenData(source.pilot(), source)


def _most_rows(source: Source, pool: int | str) -> int:
    """Return the number of rows that a pool may have."""
    return source.most_rows if isinstance(pool, str) else pool


def gradients(
    model: Model,
    unknowns: Unknowns,
    point: Mapping[str, Any],
    given: Mapping[str, Any],
    preconditioner: Any,
    effects: Sequence[ClusterEffect] = (),
) -> tuple[MinibatchGradient, tuple[ControlVariates | None, AroundExpansion | None]]:
    """Return the plain gradient, and control variates of first and second order, or None for them.

    Parameters
    ----------
    model : pm.Model
    unknowns : Unknowns
    point : dict
        A point of the model.
    given : dict
        Values of all shared arguments.
    preconditioner : "diag", "dense", "auto", array or None
        In use: with one that is given, settings have the unit of the model's own form.
    effects : list of ClusterEffect
        To be integrated out.
    """
    centring = given["centring"]
    may_centre = centring is not None
    if centring == "auto":
        # JAX can't compile the change of coordinates for any number of rows
        uses_jax = is_jax((given["compile_kwargs"] or {}).get("mode"))
        may_centre = isinstance(preconditioner, str) and not uses_jax
    rewriting = Rewriting(
        integrated=tuple(effects), recover=given["recover"], may_centre=may_centre
    )
    rows, source = _rows(model, unknowns, point, given, rewriting)
    if isinstance(preconditioner, str):  # which is chosen by how rows differ
        refuse_single_rows([g.batch_size for g in rows.groups if g.batch_size < g.n_rows])
    begin_phase(f"{COMPILING} gradients")
    density = LogDensity(rows, given["compile_kwargs"])
    pool = None if source is None else _pool_plan(source, density, given)
    plain = minibatch_gradient(rows, density, source, given["replace"], pool)
    if effects and density.given_types and not given["recover"]:
        others = quoted(name for name, _ in density.given_types)
        raise ValueError(
            f"recover=False with marginalize={given['marginalize']!r}: other steps sample "
            f"{others}, given the effects. Leave it at True, or let this step sample all of them."
        )
    if isinstance(centring, dict):
        _use_given_centring(density, centring)
    advise_to_integrate_out(model, given, point, unknowns, plain)
    return plain, _control_variates(plain, given["gradient"], given["batch_size"])


def compile_second_derivatives(gradient: MinibatchGradient) -> None:
    """Compile what exact Hessians are made of, unless it is there; rows of clusters have none.

    Nor have those whose log-likelihood is bent in kinks alone.

    A step that is given all of its settings makes no fit, and needs no Hessian.
    """
    passes = gradient.passes
    if passes.second_derivatives_are_known or gradient.density.graph.model.is_clustered:
        return
    found = second_derivatives(gradient.density)
    is_in_memory = gradient.data.n_reads is None
    if found is not None and is_in_memory and is_straight(found, gradient.density, gradient.data):
        found = None  # curvatures are told by slopes that are far apart
    passes.second_derivatives = found
    passes.second_derivatives_are_known = True


def pool_of(given: Mapping[str, Any]) -> int | str | None:
    """Return how many rows are kept in memory, as given; None where a step goes through all.

    Parameters
    ----------
    given : dict
        Values of all shared arguments.
    """
    goes_through_all = given["gradient"] == "plain" or not given["replace"]
    return None if goes_through_all else given["pool"]


def _pool_plan(source: Source, density: LogDensity, given: Mapping[str, Any]) -> PoolPlan | None:
    """Say how many rows a pool has; None where there is none.

    A gradient that other steps change in each draw would need all rows.
    """
    size = pool_of(given)
    if size is None or density.likelihood_needs_others:
        return None
    error = POOL_SHARE * given["target_bias"]
    least = ROWS_PER_PARAMETER * density.d
    if isinstance(size, str):
        most = source.most_rows
        if least > most:
            return None
        return PoolPlan(size=min(max(POOL_ROWS, least), most), most=most, error=error)
    if size < least:
        raise ValueError(
            f"pool={size}: a pool needs {ROWS_PER_PARAMETER} rows for each of the {density.d:,} "
            f'parameters. Pass at least {least}, or "auto".'
        )
    return PoolPlan(size=size, most=size, error=error)


def _rows(
    model: Model,
    unknowns: Unknowns,
    point: Mapping[str, Any],
    given: Mapping[str, Any],
    rewriting: Rewriting,
) -> tuple[RowModel, Source | None]:
    """Cut the model into rows of minibatches that were asked for, or into none.

    "auto" uses all data where there can't be minibatches, and says so.
    """
    batch_size = given["batch_size"]
    data = given["data"]
    if batch_size == "auto" and not model.observed_RVs and data is None:
        batch_size = None  # a prior has no rows
    if batch_size is None and not minibatch_outputs([model.logp()]):
        if rewriting.integrated:
            batch_size = ALL_ROWS  # groups are cut out of all data, too
        elif rewriting.may_centre and data is None:
            by_row = _all_rows_with_centred_effects(model, unknowns, point, rewriting)
            if by_row is not None:
                return by_row
    try:
        by_row = model_by_row(model, unknowns, batch_size, point, data, rewriting, pool_of(given))
    except NeedsAllRows as reason:
        if batch_size != "auto" or data is not None or rewriting.integrated:
            raise
        _log.warning(
            "All data are used at every step, since minibatches can't be: the posterior is right, "
            f"and sampling takes longer. {reason.advice}"
        )
        return model_by_row(model, unknowns, None, point, None, rewriting)
    rows, _ = by_row
    if rows.likelihoods or given["batch_size"] == "auto":
        _say_what_is_used_whole(model)
    return by_row


def _all_rows_with_centred_effects(
    model: Model, unknowns: Unknowns, point: Mapping[str, Any], rewriting: Rewriting
) -> tuple[RowModel, Source | None] | None:
    """Cut a model into rows that are all used, where it has group effects to centre; else None."""
    try:
        by_row = model_by_row(model, unknowns, ALL_ROWS, point, None, rewriting)
    except (ValueError, NotImplementedError):  # its rows can't be told apart
        return None
    rows, _ = by_row
    return by_row if rows.rewrites else None


def _say_what_is_used_whole(model: Model) -> None:
    """Name potentials that are computed from arrays at every step, where minibatches were meant."""
    for potential in model.potentials:
        lengths = [array_of(source).shape[0] for source in data_leaves(potential)]
        n_numbers = max(lengths, default=0)
        if n_numbers >= MANY_NUMBERS:
            _log.info(
                f"pm.Potential({potential.name!r}) is computed from all of its {n_numbers:,} "
                "numbers at every step. Written as the likelihood of an observed variable, for "
                "example with pm.CustomDist, it would be computed from minibatches, too."
            )


def _control_variates(
    plain: MinibatchGradient, kind: str, batch_size: BatchSize
) -> tuple[ControlVariates | None, AroundExpansion | None]:
    """Return those of first and second order that a kind of gradient may use."""
    may_be_exact = isinstance(batch_size, str)
    if kind in ("control_variates", "second_order") and plain.is_exact and not may_be_exact:
        raise ValueError(
            f'gradient="{kind}": the gradient uses all data and has no noise. Pass a '
            'batch_size, or gradient="auto".'
        )
    moves = kind == "auto" and plain.density.likelihood_needs_others
    if kind == "plain" or plain.is_exact or moves:
        return None, None
    begin_phase(f"{COMPILING} control variates")
    second = None
    if kind in ("auto", "second_order"):
        compile_second_derivatives(plain)
        try:
            second = second_order(plain)
        except NotApplicable as reason:
            if kind == "second_order":
                raise ValueError(
                    f'gradient="second_order": {reason}. Use gradient="control_variates", or '
                    '"auto".'
                ) from None
    return ControlVariates(plain), second


def _use_given_centring(density: LogDensity, weights: Mapping[str, float]) -> None:
    """Put λ into use that are given by name."""
    centring = centring_of(density)
    if centring is not None:
        centring.use(weights)
    elif weights:
        raise ValueError(not_an_effect(weights, next(iter(weights)), ()))
