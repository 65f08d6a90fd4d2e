"""Partial centring: positions in coordinates between the centred and the non-centred form.

Each entry of an effect u of scale τ has the coordinate a = uτ^(λ−1), see `reparametrisation`.
Knows positions and compiled graphs, and no way of choosing λ.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pymc.model import Model
from pymc.pytensorf import join_nonshared_inputs

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.rewrite import MeanField, Rewrite
from pymc_sghmc.hierarchy.centring_weights import ChosenWeights, chosen_weights
from pymc_sghmc.hierarchy.reparametrisation import Reparametrised, reparametrised
from pymc_sghmc.hierarchy.scaled_effects import ScaledEffect, scaled_effects
from pymc_sghmc.models.row_model import Input, RowModel
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = ["PartialCentring", "centring_of", "not_an_effect", "partially_centre"]


def partially_centre(rows: RowModel, model: Model) -> RowModel:
    """Write a model in coordinates in which its effects of unknown scale are partially centred.

    A model without such effects, or without rows that tell how far to centre, stays as it is.
    """
    if not rows.likelihoods:
        return rows
    effects = scaled_effects(model, rows.terms, rows.parameters)
    if not effects:
        return rows
    weights = pt.dvector("centring")
    graphs = [rows.log_prior, *rows.terms, *rows.held.values()]
    written = reparametrised(effects, graphs, rows.parameters, weights)
    log_prior, *graphs = written.graphs
    terms = graphs[: len(rows.terms)]
    held = graphs[len(rows.terms) :]
    centring = PartialCentring(effects, rows, written, weights)
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
    """The coordinates a = uτ^(λ−1) of the effects u of a model.

    Parameters
    ----------
    effects : list of ScaledEffect
    rows : RowModel
        In the model's own coordinates.
    written : Reparametrised
        The same in the new ones.
    weights : TensorVariable
        λ, in its graphs.

    Attributes
    ----------
    group_coefficients : dict of {str: slice}
        Where the entries of each effect lie in a position.
    as_written : array
        λ of each entry with which positions are the model's own.
    weights : array
        λ in use.
    is_free : bool
        Whether they are still to be chosen.
    """

    changes_coordinates = True

    def __init__(
        self,
        effects: list[ScaledEffect],
        rows: RowModel,
        written: Reparametrised,
        weights: pt.TensorVariable,
    ) -> None:
        parameters = rows.parameters
        self.group_coefficients = {
            effect.value.name: parameters.places[effect.value.name] for effect in effects
        }
        sizes = [place.stop - place.start for place in self.group_coefficients.values()]
        self.as_written = np.repeat([effect.written for effect in effects], sizes)
        self.weights = self.as_written
        self.is_free = True
        self._fitted: ChosenWeights | None = None  # what they were chosen by
        self.inputs = (Input(weights, self.current_weights),)
        self._ways = (
            (written.to_model, written.variables),
            (written.from_model, list(rows.variables)),
        )
        self._point = rows.point

    def current_weights(self) -> np.ndarray:
        """Return λ in use."""
        return self.weights

    def compile(self, density: LogDensity) -> None:
        """Compile the ways between the model's own coordinates and these."""
        functions = []
        for way, variables in self._ways:
            [joined], position = join_nonshared_inputs(self._point, [way], variables)
            inputs = [position, self.inputs[0].symbol]
            functions.append(density.compiled(inputs, joined.astype(position.dtype)))
        self._to_model, self._from_model = functions
        self._dtype = position.dtype  # C takes no other
        self._ways = self._point = None  # type: ignore[assignment]

    def to_model(self, position: np.ndarray) -> np.ndarray:
        """Return what a position is in the model's own coordinates."""
        return self._to_model(position.astype(self._dtype, copy=False), self.weights)

    def from_model(self, position: np.ndarray) -> np.ndarray:
        """Return the position of parameters in the model's own coordinates."""
        return self._from_model(position.astype(self._dtype, copy=False), self.weights)

    def choose(
        self, gradient: MinibatchGradient, *points: np.ndarray | None
    ) -> tuple[np.ndarray | None, ...]:
        """Choose λ of all effects that are not given, by a Gaussian fit from the first point."""
        if not self.is_free:
            return points
        own = [None if point is None else self.to_model(point) for point in points]
        self._fitted = chosen_weights(gradient, self, own[0])  # type: ignore[arg-type]
        self.weights = self._fitted.weights
        self.is_free = False
        return tuple(None if point is None else self.from_model(point) for point in own)

    @property
    def independent(self) -> MeanField | None:
        """The Gaussian that λ was chosen by, in these coordinates."""
        if self._fitted is None or self._fitted.independent is None:
            return None
        mean, sds = self._fitted.independent
        return self.carried(MeanField(mean, sds))

    def carried(self, unweighted: MeanField) -> MeanField:
        """Return a Gaussian with independent parameters for λ = 0 in the coordinates in use."""
        mean, sds = unweighted
        moved = mean.copy()
        effects = np.concatenate([np.r_[place] for place in self.group_coefficients.values()])
        moved[effects] += sds[effects]  # with the scales where they are
        weights = self.weights
        self.weights = np.zeros_like(weights)
        own = [self.to_model(point) for point in (mean, moved)]
        self.weights = weights
        here, there = [self.from_model(point).astype(float) for point in own]
        sds = sds.copy()
        sds[effects] = np.abs(there - here)[effects]
        return MeanField(mean=here, sds=sds)

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
        parts = self._by_name(chosen)
        for name, weight in weights.items():
            parts[name][:] = weight
        self.weights = chosen
        self.is_free = False

    def by_name(self) -> dict[str, np.ndarray]:
        """λ in use of each effect, with its name."""
        return self._by_name(self.weights)

    def _by_name(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return views of the parts of λ, with the names of their effects."""
        sizes = [place.stop - place.start for place in self.group_coefficients.values()]
        parts = np.split(weights, np.cumsum(sizes)[:-1])
        return dict(zip(self.group_coefficients, parts, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inputs": ()}


def centring_of(density: LogDensity) -> PartialCentring | None:
    """Return the partial centring of a density, if there is any."""
    return next((r for r in density.rewrites if isinstance(r, PartialCentring)), None)


def not_an_effect(given: Mapping[str, float], name: str, effects: Iterable[str]) -> str:
    """Words for a λ that has no effect to belong to."""
    known = ", ".join(map(repr, effects)) or "none"
    return (
        f"centring={given!r}: {name!r} is no effect of this step with a scale that is unknown. "
        f"There are: {known}."
    )
