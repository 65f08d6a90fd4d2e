"""The unknowns of a step as one vector: names, shapes, and where each lies in it. Knows no graph."""

import math

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Part", "Unknowns"]


class Part(NamedTuple):
    """Some entries of one of the model's unknowns, of which a step samples no others."""

    variable: Any  # of their values, with the name of the whole
    axis: int
    numbers: np.ndarray  # of the entries, on that axis

    def of(self, whole):
        """Return these entries of the whole."""
        return np.take(whole, self.numbers, self.axis)

    def put_into(self, whole, values):
        """Return the whole with these values of the entries."""
        new = np.moveaxis(np.array(whole), self.axis, 0)
        new[self.numbers] = np.moveaxis(values, self.axis, 0)
        return np.moveaxis(new, 0, self.axis)


class Unknowns:
    """Some of a model's unknowns, raveled and joined in order.

    Parameters
    ----------
    variables : list of TensorVariable
        Value variables, in the order in which their values are joined.
    point : dict of {str: array}
        A point of PyMC's, which gives their shapes.
    parts : list of Part, optional
        Which come after the variables.

    Attributes
    ----------
    variables : tuple of TensorVariable
        Those of parts among them.
    names : tuple of str
    shapes : tuple of tuple
    places : dict of {str: slice}
        Where each unknown lies in a position.
    d : int
        Length of a position.
    dtype : numpy.dtype
        Of a position: single precision where all unknowns have it.
    """

    def __init__(self, variables, point, parts=()):
        self.variables = (*variables, *(part.variable for part in parts))
        self.names = tuple(variable.name for variable in self.variables)
        self.parts = {part.variable.name: part for part in parts}
        own = self.of(point)
        self.shapes = tuple(np.shape(own[name]) for name in self.names)
        ends = np.cumsum([math.prod(shape) for shape in self.shapes], dtype=int).tolist()
        starts = [0, *ends[:-1]]
        self.places = dict(zip(self.names, map(slice, starts, ends), strict=True))
        self.d = ends[-1] if ends else 0
        self.dtype = np.result_type(*(variable.dtype for variable in self.variables))

    def with_parts(self, parts, point):
        """Return these unknowns with parts of others after them."""
        return Unknowns(self.variables, point, parts)

    def of(self, point) -> dict:
        """Return a point with the entries of parts alone where the whole was."""
        return point | {name: part.of(point[name]) for name, part in self.parts.items()}

    def ravel(self, point) -> np.ndarray:
        """Return the position of a point, (d,)."""
        own = self.of(point)
        parts = [np.ravel(own[name]) for name in self.names]
        return np.concatenate(parts, dtype=self.dtype, casting="unsafe")

    def unravel(self, position, point) -> dict:
        """Return ``point`` with the values that the unknowns have at a position."""
        new = dict(point)
        for variable, shape in zip(self.variables, self.shapes, strict=True):
            name = variable.name
            values = position[self.places[variable.name]].reshape(shape)
            part = self.parts.get(name)
            values = values if part is None else part.put_into(point[name], values)
            new[name] = values.astype(variable.dtype)
        return new

    def name_of(self, index) -> str:
        """Name of an entry of a position, such as ``beta[3]``."""
        for (name, place), shape in zip(self.places.items(), self.shapes, strict=True):
            if place.start <= index < place.stop:
                entry = [int(i) for i in np.unravel_index(index - place.start, shape)]
                if part := self.parts.get(name):
                    entry[part.axis] = int(part.numbers[entry[part.axis]])
                return f"{name}[{', '.join(map(str, entry))}]" if shape else name
        raise IndexError(index)
