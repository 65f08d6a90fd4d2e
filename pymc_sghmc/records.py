"""Records that hold arrays, compared by value, and copies. Knows no record in particular."""

import math

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

__all__ = ["ByValue", "copied"]

Instance = TypeVar("Instance")


def copied(instance: Instance, **changes: Any) -> Instance:
    """Return a copy with the very same attributes but for ``changes``.

    `copy.copy` would take what the instance has for a pickle, which is less.
    """
    copy = object.__new__(type(instance))
    copy.__dict__.update({**instance.__dict__, **changes})
    return copy


class ByValue:
    """Base of dataclasses with arrays among their fields, to be declared with ``eq=False``.

    The comparison that `dataclasses` writes fails where a field is an array. Here two records are
    equal if they are of one class and all their fields are equal, NaN with NaN.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and all(
            _are_equal(mine, its) for mine, its in zip(_values(self), _values(other), strict=True)
        )

    def __hash__(self) -> int:
        return hash((type(self).__qualname__, *map(_hashable, _values(self))))


def _values(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in fields(record)]


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=True))
    if isinstance(a, tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _hashable(value: Any) -> Any:
    """Return the same for equal values: single and double precision, −0 and 0."""
    if isinstance(value, np.ndarray):
        return value.shape, (value.astype(float) + 0.0).tobytes()
    if isinstance(value, tuple):
        return tuple(map(_hashable, value))
    return "NaN" if isinstance(value, float) and math.isnan(value) else value
