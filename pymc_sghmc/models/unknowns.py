"""The parameters of a step as one vector: names, shapes, and where each lies in it."""

import math

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pymc.util import get_untransformed_name, is_transformed_name
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.protocols import Array

__all__ = ["Unknowns"]


class Unknowns:
    """Some of a model's unknowns, raveled and joined in order.

    Parameters
    ----------
    variables : list of TensorVariable
        Value variables, in the order in which their values are joined.
    point : dict of {str: array}
        A point of PyMC's, which gives their shapes.

    Attributes
    ----------
    variables : tuple of TensorVariable
    names : tuple of str
    shapes : tuple of tuple
    places : dict of {str: slice}
        Where each unknown lies in a position.
    d : int
        Length of a position.
    dtype : numpy.dtype
        Of a position: single precision where all unknowns have it.
    """

    def __init__(self, variables: Iterable[TensorVariable], point: Mapping[str, Any]) -> None:
        self.variables = tuple(variables)
        self.names = tuple(variable.name for variable in self.variables)
        self.shapes = tuple(np.shape(point[name]) for name in self.names)
        ends = np.cumsum([math.prod(shape) for shape in self.shapes], dtype=int).tolist()
        starts = [0, *ends[:-1]]
        self.places = dict(zip(self.names, map(slice, starts, ends), strict=True))
        self.d = ends[-1] if ends else 0
        self.dtype = np.result_type(*(variable.dtype for variable in self.variables))

    @property
    def transformed(self) -> list[int]:
        """Places of what PyMC has transformed, as logarithms of positive parameters."""
        return [
            i
            for name, place in self.places.items()
            if is_transformed_name(name)
            for i in range(place.start, place.stop)
        ]

    def ravel(self, point: Mapping[str, Any]) -> Array:
        """Return the position of a point, (d,)."""
        parts = [np.ravel(point[name]) for name in self.names]
        return np.concatenate(parts, dtype=self.dtype, casting="unsafe")

    def unravel(self, position: Array, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``point`` with the values that the unknowns have at a position."""
        new = dict(point)
        for variable, shape in zip(self.variables, self.shapes, strict=True):
            name = variable.name
            values = position[self.places[variable.name]].reshape(shape)
            new[name] = values.astype(variable.dtype)
        return new

    def unknown_of(self, index: int) -> str:
        """Name of the unknown that an entry of a position belongs to."""
        [name] = [n for n, place in self.places.items() if place.start <= index < place.stop]
        return name

    def own_name_of(self, index: int) -> str:
        """Name of the parameter that an entry of a position belongs to, without a transform's."""
        name = self.unknown_of(index)
        return get_untransformed_name(name) if is_transformed_name(name) else name

    def name_of(self, index: int) -> str:
        """Name of an entry of a position, such as ``beta[3]``."""
        for (name, place), shape in zip(self.places.items(), self.shapes, strict=True):
            if place.start <= index < place.stop:
                entry = [int(i) for i in np.unravel_index(index - place.start, shape)]
                return f"{name}[{', '.join(map(str, entry))}]" if shape else name
        raise IndexError(index)
