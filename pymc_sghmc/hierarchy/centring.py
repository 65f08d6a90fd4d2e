"""Partial centring: positions in coordinates between the centred and the non-centred form.

Each entry of an effect u of scale τ has a coordinate a, see `reparametrisation`. Knows positions
and compiled graphs, and no way of choosing how far effects are centred.
"""

import itertools

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pymc.model import Model
from pymc.pytensorf import join_nonshared_inputs
from pytensor.graph.replace import clone_replace

from pymc_sghmc.gradients.density import Density, LogDensity
from pymc_sghmc.gradients.jacobians import columns_of
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.rewrite import MeanField, Rewrite
from pymc_sghmc.gradients.row_coordinates import LinearRows
from pymc_sghmc.hierarchy.centring_choice import Chosen, choose
from pymc_sghmc.hierarchy.packed_factors import PackedFactor, packed_factors
from pymc_sghmc.hierarchy.reparametrisation import (
    Centring,
    Reparametrised,
    pairs,
    reparametrised,
    shared_variables,
)
from pymc_sghmc.hierarchy.scaled_effects import ScaledEffect, scaled_effects
from pymc_sghmc.models.row_model import Input, RowModel
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = ["PartialCentring", "centring_of", "not_an_effect", "partially_centre"]

LEAST_SCALE = 1e-100  # for one that comes to zero, so that what is divided by its square is finite


def partially_centre(rows: RowModel, model: Model) -> RowModel:
    """Write a model in coordinates in which its effects of unknown scale are partially centred.

    A model without such effects, or without rows that tell how far to centre, stays as it is.
    """
    if not rows.likelihoods:
        return rows
    effects = scaled_effects(model, rows.terms, rows.log_prior, rows.parameters)
    if not effects:
        return rows
    inputs = Centring(
        weights=pt.dvector("centring"),
        information=pt.dvector("information"),
        pull=pt.dvector("pull"),
        above=pt.lvector("above"),
        coupling=pt.dvector("coupling"),
        columns=pt.lvector("columns"),
        by_shared=pt.dmatrix("by_shared"),
        whole=pt.dscalar("whole"),
    )
    graphs = [rows.log_prior, *rows.terms, *rows.held.values()]
    factors = packed_factors(model, rows.parameters)
    shared = shared_variables(model, effects, rows.parameters)
    written = reparametrised(effects, factors, graphs, rows.parameters, shared, inputs)
    log_prior, *graphs = written.graphs
    terms = graphs[: len(rows.terms)]
    held = graphs[len(rows.terms) :]
    places = [rows.parameters.places[variable.name] for variable in shared]
    centring = PartialCentring(effects, factors, places, rows, written, inputs)
    likelihoods = [
        replace(likelihood, log_likelihood=term)
        for likelihood, term in zip(rows.likelihoods, terms, strict=True)
    ]
    return replace(
        rows,
        variables=tuple(written.variables),
        log_prior=log_prior + written.log_jacobian,
        likelihoods=tuple(likelihoods),
        held=dict(zip(rows.held, held, strict=True)),
        rewrites=(*rows.rewrites, centring),
    )


class PartialCentring(Rewrite):
    """The coordinates a of the effects u of a model.

    Parameters
    ----------
    effects : list of ScaledEffect
    factors : list of PackedFactor
        Of covariances, whose coordinates change with those of effects.
    shared : list of slice
        Places of variables that all groups share, on which coordinates may depend.
    rows : RowModel
        In the model's own coordinates.
    written : Reparametrised
        The same in the new ones.
    inputs : Centring
        Of its graphs.

    Attributes
    ----------
    group_coefficients : dict of {str: slice}
        Where the entries of each effect lie in a position.
    group_columns : list of array
        The same, by coefficient of a group.
    as_written : array
        λ of each entry with which positions are the model's own.
    weights, information, pull : array
        λ, h and b in use, of each entry.
    pairs : list of (int, int)
        Numbers of effects, and of those of maybe larger groups that their rows may see with them.
    above, coupling : array
        For each pair and each entry of its first: an entry of the second, and k in use.
    shared : array
        Places in a position of the entries of variables that all groups share.
    columns, by_shared : array
        Numbers among these with which b falls, (m,), and by how much, (n, m).
    whole : array
        1.0 where coordinates are free of a prior's tails and correlation, 0.0 where λ is given.
    shares : array or None
        How far each entry is centred, from 0 to 1, where that isn't λ.
    is_free : bool
        Whether they are still to be chosen.
    """

    changes_coordinates = True

    def __init__(
        self,
        effects: list[ScaledEffect],
        factors: list[PackedFactor],
        shared: list[slice],
        rows: RowModel,
        written: Reparametrised,
        inputs: Centring,
    ) -> None:
        parameters = rows.parameters
        self.group_coefficients = {
            effect.value.name: parameters.places[effect.value.name] for effect in effects
        }
        shapes = dict(zip(parameters.names, parameters.shapes, strict=True))
        self.group_columns = [
            place.start + column
            for name, place in self.group_coefficients.items()
            for column in columns_of([shapes[name]])
        ]
        self._factors = [parameters.places[factor.value.name] for factor in factors]
        sizes = [place.stop - place.start for place in self.group_coefficients.values()]
        self.as_written = np.repeat([effect.written for effect in effects], sizes)
        self.weights = self.as_written
        self.information = self.pull = np.zeros(self.as_written.size)
        self.pairs = list(pairs(effects))
        n_coupled = sum(sizes[i] for i, _ in self.pairs)
        self.above = np.zeros(n_coupled, dtype=np.int64)
        self.coupling = np.zeros(n_coupled)
        self.shared = np.concatenate([[], *(np.r_[place] for place in shared)]).astype(np.int64)
        self.columns = np.zeros(0, dtype=np.int64)
        self.by_shared = np.zeros((self.as_written.size, 0))
        self.whole = np.zeros(())
        self.shares: np.ndarray | None = None
        self.is_free = True
        self._fitted: Chosen | None = None  # what they were chosen by
        self.linear_rows = _linear_rows(effects, rows, written)
        self.inputs = tuple(
            Input(symbol, partial(getattr, self, name)) for name, symbol in inputs._asdict().items()
        )
        self._ways = (
            (written.to_model, written.variables),
            (written.from_model, list(rows.variables)),
            (written.seen, written.variables),
        )
        self._point = rows.point

    def compile(self, density: LogDensity) -> None:
        """Compile the ways between the model's own coordinates and these."""
        functions = []
        for way, variables in self._ways:
            [joined], position = join_nonshared_inputs(self._point, [way], variables)
            inputs = [position, *(entry.symbol for entry in self.inputs)]
            functions.append(density.compiled(inputs, joined.astype(position.dtype)))
        self._to_model, self._from_model, self._effects = functions
        self._dtype = position.dtype  # C takes no other
        self._ways = self._point = None  # type: ignore[assignment]

    def to_model(self, position: np.ndarray) -> np.ndarray:
        """Return what a position is in the model's own coordinates."""
        return self._to_model(position.astype(self._dtype, copy=False), *self._in_use)

    def from_model(self, position: np.ndarray) -> np.ndarray:
        """Return the position of parameters in the model's own coordinates."""
        return self._from_model(position.astype(self._dtype, copy=False), *self._in_use)

    def effects(self, position: np.ndarray) -> np.ndarray:
        """Return a position with the effects u themselves in their places."""
        return self._effects(position.astype(self._dtype, copy=False), *self._in_use)

    @property
    def _in_use(self) -> tuple[np.ndarray, ...]:
        return tuple(getattr(self, name) for name in Centring._fields)

    def set_coordinates(
        self,
        weights: np.ndarray,
        information: np.ndarray | None = None,
        pull: np.ndarray | None = None,
        above: np.ndarray | None = None,
        coupling: np.ndarray | None = None,
        columns: np.ndarray | None = None,
        by_shared: np.ndarray | None = None,
        whole: np.ndarray | float = 0.0,
    ) -> None:
        """Take λ, h, b and k into use; all but λ are 0 where they aren't given."""
        none = np.zeros(self.as_written.size)
        self.weights = weights
        self.information = none if information is None else information
        self.pull = none if pull is None else pull
        self.above = np.zeros_like(self.above) if above is None else above
        self.coupling = np.zeros_like(self.coupling) if coupling is None else coupling
        self.columns = np.zeros(0, dtype=np.int64) if columns is None else columns
        no_columns = np.zeros((self.as_written.size, self.columns.size))
        self.by_shared = no_columns if by_shared is None else by_shared
        self.whole = np.asarray(whole, dtype=float)

    def choose(
        self, gradient: MinibatchGradient, *points: np.ndarray | None
    ) -> tuple[np.ndarray | None, ...]:
        """Choose λ of all effects that are not given, by a Gaussian fit from the first point."""
        if not self.is_free:
            return points
        own = [None if point is None else self.to_model(point) for point in points]
        chosen = choose(gradient, self, own[0])  # type: ignore[arg-type]
        self._fitted = chosen
        self.set_coordinates(*chosen.coordinates)
        self.shares = chosen.shares
        self.is_free = False
        return tuple(None if point is None else self.from_model(point) for point in own)

    @property
    def independent(self) -> MeanField | None:
        """The Gaussian that coordinates were chosen by, in these."""
        if self._fitted is None or self._fitted.independent is None:
            return None
        mean, sds = self._fitted.independent
        return self.carried(MeanField(mean, sds))

    def carried(self, unweighted: MeanField) -> MeanField:
        """Return a Gaussian with independent parameters for u = τa in the coordinates in use."""
        mean, sds = unweighted
        in_use = self._in_use
        self.set_coordinates(np.zeros(self.as_written.size))
        own_mean = self.to_model(mean)
        points = itertools.chain(self.moved(mean, sds), self._moved_factors(mean, sds))
        moved = [(place, self.to_model(point)) for place, point in points]
        self.set_coordinates(*in_use)
        here = self.from_model(own_mean).astype(float)
        sds = sds.copy()
        for place, own in moved:
            sds[place] = np.abs(self.from_model(own) - here)[place]
        return MeanField(mean=here, sds=sds)

    def scales(self, position: np.ndarray) -> np.ndarray:
        """Return ∂u/∂a of each entry of the effects, with all other parameters where they are."""
        by_effect = self.derivatives(position)
        found = [by_effect[name][place] for name, place in self.group_coefficients.items()]
        return np.maximum(np.concatenate(found), LEAST_SCALE)

    def derivatives(self, position: np.ndarray) -> dict[str, np.ndarray]:
        """Return how all effects u change with a of one of them, (d,), with its name."""
        here = self.effects(position)
        moved = self.moved(position, np.ones(position.size))
        return {
            name: self.effects(point) - here
            for name, (_, point) in zip(self.group_coefficients, moved, strict=True)
        }

    def moved(self, position: np.ndarray, by: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Move the entries of one effect after the other; others may have it as their mean."""
        for place in self.group_coefficients.values():
            point = position.copy()
            point[place] += by[place]
            yield place, point

    def _moved_factors(
        self, position: np.ndarray, by: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Move the entries of factors one after the other."""
        for place in self._factors:
            for i in range(place.start, place.stop):
                point = position.copy()
                point[i] += by[i]
                yield slice(i, i + 1), point

    def taken_fit(self, start: np.ndarray) -> GaussianFit | None:
        """Return the fit that was made when λ was chosen, if it began here; data may change."""
        fitted = self._fitted
        if fitted is None or fitted.start is None or not np.array_equal(start, fitted.start):
            return None
        self._fitted = fitted._replace(fit=None)
        return fitted.fit

    def use(self, weights: Mapping[str, float]) -> None:
        """Take λ of these effects into use; others are as the model is written.

        Raises
        ------
        ValueError
            If a name is that of no effect.
        """
        unknown = [name for name in weights if name not in self.group_coefficients]
        if unknown:
            raise ValueError(not_an_effect(weights, unknown[0], self.group_coefficients))
        chosen = self.as_written.copy()
        parts = self.named(chosen)
        for name, weight in weights.items():
            parts[name][:] = weight
        self.set_coordinates(chosen)
        self.is_free = False

    def by_name(self) -> dict[str, np.ndarray]:
        """How far the entries of each effect are centred, from 0 to 1, with its name."""
        return self.named(self.weights if self.shares is None else self.shares)

    def named(self, entries: np.ndarray) -> dict[str, np.ndarray]:
        """Return views of the parts of a vector of all entries, with the names of their effects."""
        sizes = [place.stop - place.start for place in self.group_coefficients.values()]
        parts = np.split(entries, np.cumsum(sizes)[:-1])
        return dict(zip(self.group_coefficients, parts, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inputs": (), "linear_rows": None}


def _linear_rows(
    effects: list[ScaledEffect], rows: RowModel, written: Reparametrised
) -> LinearRows | None:
    """Rows as graphs of the effects themselves, without their scales; None where that isn't known.

    In the model's variables, which stand for the effects wherever they were multiplied by a scale.
    """
    if rows.rewrites or not all(effect.written or effect.products for effect in effects):
        return None
    products = {one.product: one.alone for effect in effects for one in effect.products}
    terms = clone_replace(rows.terms, products, rebuild_strict=False) if products else rows.terms
    return LinearRows(terms=terms, variables=rows.variables, seen=written.seen)


def centring_of(density: Density) -> PartialCentring | None:
    """Return the partial centring of a density, if there is any."""
    return next((r for r in density.rewrites if isinstance(r, PartialCentring)), None)


def not_an_effect(given: Mapping[str, float], name: str, effects: Iterable[str]) -> str:
    """Words for a λ that has no effect to belong to."""
    known = ", ".join(map(repr, effects)) or "none"
    return (
        f"centring={given!r}: {name!r} is no effect of this step with a scale that is unknown. "
        f"There are: {known}."
    )
