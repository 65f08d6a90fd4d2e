"""Groups of so many rows that their effects stay unknowns, while those of all others are integrated out.

Knows graphs of rows and their groups, no quadrature.
"""

import pytensor.tensor as pt

from pymc_sghmc.models.unknowns import Part

__all__ = ["KeptGroups"]


class KeptGroups:
    """The numbers of a few groups, as unknowns.

    Parameters
    ----------
    rows : GroupedRows
    groups : array of int
        Which they are.

    Attributes
    ----------
    parts : list of Part
        Of the effects.
    numbers : TensorVariable
        A matrix, (groups, k), of the parts.
    """

    def __init__(self, rows, groups):
        self.groups = groups
        self.parts = []
        found = []
        for effect in rows.effects:
            shape = list(effect.shape)
            shape[effect.axis] = groups.size
            value = effect.value.type.clone(shape=tuple(shape))(effect.value.name)
            self.parts.append(Part(value, effect.axis, groups))
            found.append(pt.moveaxis(value, effect.axis, 0).reshape((groups.size, effect.size)))
        self.numbers = pt.concatenate(found, axis=1)
        self._rows = rows

    @property
    def prior(self):
        """Log-density of their numbers, a scalar."""
        return self._rows.prior(self.numbers, pt.as_tensor(self.groups)).sum()

    def __getstate__(self):
        return {**self.__dict__, "_rows": None, "parts": None, "numbers": None}
