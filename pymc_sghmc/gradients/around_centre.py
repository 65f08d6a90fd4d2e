"""What gradients that know all rows at a centre have in common. Knows no formula of theirs."""

from copy import deepcopy

__all__ = ["AroundCentre"]


class AroundCentre:
    """A gradient with an ``anchor``: what it knows of all rows, and in which order it draws them.

    A copy has its own density, data and orders, as chains do; compiled functions stay the same.
    """

    _own = "density", "data", "passes"  # attributes of which a copy has its own

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        for name in self._own:
            setattr(copied, name, deepcopy(getattr(self, name), memo))
        if self.anchor is not None:
            copied.anchor = self.anchor._replace(order=deepcopy(self.anchor.order, memo))
        return copied

    def __getstate__(self):
        return {**self.__dict__, "_symbols": None, "_placed": None}

    @property
    def order(self):
        """In which order rows are drawn, by what is known at the centre."""
        return self.anchor.order
