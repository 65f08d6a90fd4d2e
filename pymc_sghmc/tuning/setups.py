"""The set-ups of a step: made, kept for the chains that begin alike, and told apart by value.

Chains one after another share a step, so that two are kept: that of the initial point and that of
the chain. Knows gradients and set-ups, no settings of a sampler.
"""

import numpy as np

from pymc_sghmc.faults import NonFinite
from pymc_sghmc.tuning.centre import near
from pymc_sghmc.tuning.nodes import place_nodes
from pymc_sghmc.tuning.setup import same_arrays, same_inputs, set_up

__all__ = ["Setups"]

MUCH_SHORTER = 4  # times, that a learning rate is by the curvature far out


class Setups:
    """Makes set-ups, and remembers the one in use.

    Parameters
    ----------
    gradient : MinibatchGradient
    expansions : tuple
        Control variates of first and of second order, or None for either: they get the anchors of
        the set-up in use.
    preconditioner : {"auto", "diag", "dense"}, array or None
        An array is M⁻¹.
    centre : array of shape (d,) or None
        A point to use instead of the mode.
    temperature : float
    """

    def __init__(self, gradient, expansions, *, preconditioner, centre, temperature):
        self._gradient = gradient
        self._expansions = expansions
        self._preconditioner = preconditioner
        self.given_centre = centre
        self._temperature = temperature
        self.current = self._first = None
        self._near_centre = self._placed_for = None  # where nodes were placed, and for which data
        self.made_from = None  # start, scale, highest order, other unknowns of the set-up in use

    def make(self, start, scale=None, highest=2):
        """Take a set-up from here into use, one that is known where nothing has changed.

        With a ``scale``, the metric of an earlier centre, ``start`` is the centre. No control
        variates are of a higher order than ``highest``.
        """
        density = self._gradient.density
        begin = start
        given = (*density.others, *density.held)
        optimise = scale is None and self.given_centre is None
        if scale is None and not density.nodes_need_others:
            self.place_nodes(start)
        if self.given_centre is not None:
            begin = self.given_centre
        elif optimise and self._near_centre is not None:
            begin = self._near_centre
        key = (begin, (scale is None, highest), given, self._gradient.data.arrays)
        known = [s for s in (self.current, self._first) if s and same_inputs(s.key, key)]
        if known:
            self._use(known[0])
        else:
            if not self.is_finite_at(start):
                raise NonFinite(start, start, np.nan)
            if density.nodes_need_others:
                begin = place_nodes(self._gradient, begin, None if optimise else begin)
            self.current = set_up(
                self._gradient,
                [e if order <= highest else None for order, e in enumerate(self._expansions, 1)],
                begin,
                key,
                preconditioner=self._preconditioner,
                optimise=optimise,
                temperature=self._temperature,
                earlier=scale,
            )
        self.made_from = (start, scale, highest, density.others)
        return self.current

    def place_nodes(self, start):
        """Place nodes of quadrature, if there are any, unless they were placed for these data.

        From where they are any start's centre is near. Where rows depend on what other steps sample
        each set-up has its own.
        """
        arrays = self._gradient.data.arrays
        if self._placed_for is None or not same_arrays(arrays, self._placed_for):
            self._near_centre = place_nodes(self._gradient, start, self.given_centre)
            self._placed_for = arrays

    def follow(self, position):
        """Let nodes lie where effects are given what other steps have sampled, if rows depend on that."""
        density = self._gradient.density
        if density.nodes_need_others:
            density.group_effects.follow(density, self._gradient.data, position)

    def move(self, start, highest) -> bool:
        """Let ``start`` be the centre, unless steps would have to be much shorter around it; tell.

        The mean of draws from a posterior that is no Gaussian may lie where there are none.
        """
        old = self.current
        made_from = self.made_from
        try:
            self.make(start, old.centre.metric, highest)
        except NonFinite:
            return False
        is_better = self.current.far_limit >= old.far_limit / MUCH_SHORTER
        if not is_better:
            self._use(old)
            self.made_from = made_from
        return is_better

    def _use(self, setup):
        self.current = setup
        density = self._gradient.density
        if density.marginal is not None:
            *nodes, density.marginal.error = setup.nodes
            density.set_nodes(*nodes)
        for expansion, anchor in zip(self._expansions, setup.anchors, strict=True):
            if expansion is not None:
                expansion.anchor = anchor

    def make_first(self, start):
        """Take a set-up into use and keep it for the chains that will begin there."""
        self._first = self.make(start)

    def restore(self, made_from):
        """Take into use what was made from these, if it isn't: for a chain that was restored."""
        if self.made_from is None or not _equal(made_from, self.made_from):
            start, scale, highest, given = made_from
            with self._gradient.density.at(given):
                self.make(start, scale, highest)
        self.made_from = made_from  # the very same: the next draw needs no comparison

    def forget(self):
        """Let the next chain ask for its set-up: the data may have changed."""
        self.made_from = None

    def start(self, rng):
        """Draw a start that is wider spread than the posterior, so that R-hat can tell."""
        for scale in (2.0, 1.0, 0.5, 0.0):
            position = near(self.current.centre, rng, scale * self._temperature**0.5)
            position = position.astype(self._gradient.density.dtype)
            if self.is_finite_at(position):
                break
        return position

    def is_finite_at(self, position) -> bool:
        """Whether density and gradient are finite here, on some rows."""
        minibatch = self._gradient.order.probe(np.random.default_rng(0))
        with np.errstate(all="ignore"):
            logp, grad = self._gradient(position, minibatch)
        return bool(np.isfinite(logp) and np.isfinite(grad).all())

    def distance(self, position) -> float:
        """How far a position is from the centre, in its own standard deviations, at most."""
        return np.abs(self._in_sds(position)).max()

    def radius(self, position) -> float:
        """How far a position is from the centre in all directions together."""
        return float(np.linalg.norm(self._in_sds(position)))

    def _in_sds(self, position):
        shift = position - self.current.centre.position
        return self.current.centre.metric.from_theta(shift)


def _equal(made_from, other) -> bool:
    """Whether two set-ups begin at equal points, with equal scales and other unknowns."""
    (start, scale, highest, given), (start_2, scale_2, highest_2, given_2) = made_from, other
    return (
        np.array_equal(start, start_2)
        and highest == highest_2
        and scale == scale_2
        and all(map(np.array_equal, given, given_2))
    )
