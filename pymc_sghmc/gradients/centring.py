"""Positions in coordinates in which effects are centred in part, and the way there and back.

Knows positions and compiled graphs, no data and no way of choosing λ.
"""

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import join_nonshared_inputs

from pymc_sghmc.models.centring import written_in

__all__ = ["Centring", "not_an_effect"]


class Centring:
    """The coordinates a = uτ^(λ−1) of the effects u of a model, see `models.centring`.

    Parameters
    ----------
    found : list of Effects
    unknowns : Unknowns
    point : dict
        A point of the model.

    Attributes
    ----------
    places : dict of {str: slice}
        Where the entries of each effect lie in a position.
    as_written : array
        λ of each entry with which positions are the model's own.
    weights : array
        λ in use.
    is_free : bool
        Whether they are still to be chosen.
    fitted : array or None
        Mean of the Gaussian that they were chosen by, in the model's own coordinates.
    """

    def __init__(self, found, unknowns, point):
        self.places = {one.value.name: unknowns.places[one.value.name] for one in found}
        sizes = [place.stop - place.start for place in self.places.values()]
        self.as_written = np.repeat([one.written for one in found], sizes)
        self.weights = self.as_written
        self.is_free = True
        self.fitted = None
        self._found = found
        self._unknowns = unknowns
        self._point = point
        self._to_model = self._from_model = None

    def of_effects(self, values):
        """Return numbers of all unknowns, NaN where one is no effect."""
        found = np.full(len(values), np.nan)
        for place in self.places.values():
            found[place] = values[place]
        return found

    def write(self, graphs, compiled) -> tuple:
        """Write the log-density's parts, the prior first, in these coordinates.

        Parameters
        ----------
        graphs : list of TensorVariable
            In the model's variables.
        compiled : callable
            Compiles inputs and outputs.

        Returns
        -------
        graphs : list of TensorVariable
        variables : list of TensorVariable
        weights : TensorVariable
            λ, an input of the graphs.
        """
        unknowns = self._unknowns
        weights = pt.dvector("centring")
        graphs, variables, log_jacobian, *ways = written_in(self._found, graphs, unknowns, weights)
        functions = []
        for way, inputs in zip(ways, (variables, list(unknowns.variables)), strict=True):
            [way], position = join_nonshared_inputs(self._point, [way], inputs)
            functions.append(compiled([position, weights], way.astype(position.dtype)))
        self._to_model, self._from_model = functions
        self._dtype = position.dtype  # C takes no other
        self._found = self._unknowns = self._point = None
        return [graphs[0] + log_jacobian, *graphs[1:]], variables, weights

    def named(self, given) -> np.ndarray:
        """Return λ of all entries, of which some effects have theirs ``given`` by name."""
        unknown = [name for name in given if name not in self.places]
        if unknown:
            raise ValueError(not_an_effect(given, unknown[0], self.places))
        weights = self.as_written.copy()
        parts = self._by_name(weights)
        for name, weight in given.items():
            parts[name][:] = weight
        return weights

    def by_name(self) -> dict:
        """λ in use of each effect, with its name."""
        return self._by_name(self.weights)

    def _by_name(self, weights):
        """Return views of the parts of λ, with the names of their effects."""
        ends = np.cumsum([place.stop - place.start for place in self.places.values()])
        return dict(zip(self.places, np.split(weights, ends[:-1]), strict=True))

    def to_model(self, position):
        """Return what a position is in the model's own coordinates."""
        return self._to_model(position.astype(self._dtype, copy=False), self.weights)

    def from_model(self, position):
        """Return the position of unknowns in the model's own coordinates."""
        return self._from_model(position.astype(self._dtype, copy=False), self.weights)


def not_an_effect(given, name, effects) -> str:
    """Words for a λ that has no effect to belong to."""
    known = ", ".join(map(repr, effects)) or "none"
    return (
        f"centring={given!r}: {name!r} is no effect of this step with a scale that is unknown. "
        f"There are: {known}."
    )
