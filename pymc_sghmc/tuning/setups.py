"""The set-ups of a step: made on request, and kept for the chains that begin alike.

Chains one after another share a step. So the set-ups that chains begin with are kept, one for each
mode, beside the one that the present chain has moved to. Knows gradients and set-ups, no settings
of a sampler.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.gradient_noise import TunedGradient
from pymc_sghmc.tuning.setup import Setup, set_up, set_up_around
from pymc_sghmc.tuning.setup_request import DataId, SetupRequest
from pymc_sghmc.tuning.sizes import RowChoice

__all__ = ["Setups"]

MUCH_SHORTER = 4  # times, that a learning rate is by the curvature far out
MUCH_NARROWER = 1000  # times, that a standard deviation is


class Setups:
    """Makes set-ups, and remembers the one in use.

    Parameters
    ----------
    gradient : TunedGradient
    expansions : tuple
        Control variates of first and of second order, or None for either: they get the anchors of
        the set-up in use.
    preconditioner : {"auto", "diag", "dense"}, array or None
        An array is M⁻¹.
    reference_point : array of shape (d,) or None
        A point to use instead of the mode.
    temperature : float
    row_choice : RowChoice
        How the number of rows in a minibatch is chosen afterwards.

    Attributes
    ----------
    current : Setup or None
        The one in use.
    request : SetupRequest or None
        For which it was made, as chains keep it; None where the data may have changed since.
    """

    def __init__(
        self,
        gradient: TunedGradient,
        expansions: Sequence[Any],
        *,
        preconditioner: Any,
        reference_point: Array | None,
        temperature: float,
        row_choice: RowChoice = RowChoice.AS_GIVEN,
    ) -> None:
        self._gradient = gradient
        self._expansions = expansions
        self._preconditioner = preconditioner
        self.reference_point = reference_point
        self._temperature = temperature
        self._row_choice = row_choice
        self.current: Setup | None = None
        self.request: SetupRequest | None = None
        self._kept: list[
            Setup
        ] = []  # for chains that begin at the initial point, one for each mode
        # where rewrites of the model were placed, and for which data
        self._near_mean: Array | None = None
        self._placed_for: DataId | None = None

    @property
    def made(self) -> Setup:
        """The set-up in use, once there is one."""
        assert self.current is not None
        return self.current

    @property
    def fit(self) -> GaussianFit:
        """That of the set-up in use."""
        return self.made.fit

    def make(self, start: Array, max_order: int = 2) -> Setup:
        """Take a set-up from here into use, one that is known where nothing has changed.

        No control variates are of a higher order than ``max_order``.
        """
        others = self._gradient.density.others
        return self.make_for(
            SetupRequest(start=start, metric=None, max_order=max_order, conditioned_on=others)
        )

    def make_for(self, request: SetupRequest) -> Setup:
        """Take a set-up for this request into use."""
        density = self._gradient.density
        start = request.start
        optimise = request.metric is None and self.reference_point is None
        if request.metric is None and not density.placement_needs_others:
            self.place(start)
        if self.reference_point is not None:
            start = self.reference_point
        elif optimise and self._near_mean is not None:
            start = self._near_mean
        resolved = replace(
            request,
            start=start,
            conditioned_on=(*density.others, *density.held),
            data_id=DataId(self._gradient.data.arrays),
        )
        setup = self._known(resolved)
        if setup is None:
            if not self.is_finite_at(request.start):
                raise NonFinite(request.start, request.start, np.nan)
            if density.placement_needs_others:
                placed_at = self._placed_at(start, None if optimise else start)
                start = start if placed_at is None else placed_at
            # far out numbers may overflow: what isn't finite is seen where it is used
            with np.errstate(all="ignore"):
                setup = set_up(
                    self._gradient,
                    self._usable(request.max_order),
                    start,
                    resolved,
                    preconditioner=self._preconditioner,
                    optimise=optimise,
                    temperature=self._temperature,
                    row_choice=self._row_choice,
                )
            self.current = setup
        else:
            self._use(setup)
        self.request = request
        return setup

    def _usable(self, max_order: int) -> list[Any]:
        """Control variates of first and of second order, up to that of a request."""
        return [
            expansion if order <= max_order else None
            for order, expansion in enumerate(self._expansions, 1)
        ]

    def measured_anew(self) -> Setup:
        """Measure around the fit in use once more, where second-order control variates changed."""
        old = self.made
        with np.errstate(all="ignore"):
            return set_up_around(
                replace(old.fit, passes=old.passes),
                self._gradient,
                self._usable(old.request.max_order),
                old.request,
                preconditioner=self._preconditioner,
                temperature=self._temperature,
                row_choice=self._row_choice,
            )

    def begin_with(self, setup: Setup) -> None:
        """Let this one take the place of all that were made for the same request."""
        self._kept = [setup]
        self._use(setup)

    def _known(self, request: SetupRequest) -> Setup | None:
        """Return a set-up that is kept for this request, if there is one."""
        kept = [setup for setup in (self.current, *self._kept) if setup is not None]
        return next((setup for setup in kept if setup.request == request), None)

    def place(self, start: Array) -> None:
        """Let rewrites of the model adapt to the data, unless they have adapted to these.

        From where they did, any start's mean is near. Where rows depend on what other steps
        sample, each set-up has its own.
        """
        data_id = DataId(self._gradient.data.arrays)
        if data_id != self._placed_for:
            self._near_mean = self._placed_at(start, self.reference_point)
            self._placed_for = data_id

    def _placed_at(self, start: Array, reference_point: Array | None) -> Array | None:
        """Place rewrites; return where that was, if it is a good start."""
        near_mean: Array | None = None
        for rewrite in self._gradient.density.rewrites:
            if rewrite.is_placed:
                near_mean = rewrite.place(self._gradient, start, reference_point)
        return near_mean

    def follow(self, position: Array) -> None:
        """Let rewrites adapt to what other steps have sampled."""
        for rewrite in self._gradient.density.rewrites:
            rewrite.follow(self._gradient, position)

    def move(self, start: Array, max_order: int, is_exact: bool = False) -> bool:
        """Let ``start`` be the mean of the fit, unless that makes steps much shorter.

        The mean of draws from a posterior that is no Gaussian may lie where there are none.

        Parameters
        ----------
        start : array of shape (d,)
        max_order : int
        is_exact : bool, default False
            Whether chains take all rows. Without noise, all that a fit gives them are scales: those
            of one that serves aren't exchanged for those of one that doesn't, and thousands of
            them aren't made anew.

        Returns
        -------
        bool
            Whether it is.
        """
        old = self.current
        assert old is not None
        if is_exact and old.fit.is_astray:
            return False
        old_request = self.request
        request = SetupRequest(
            start=start,
            metric=old.fit.metric,
            is_mode=old.fit.is_mode,
            max_order=max_order,
            conditioned_on=self._gradient.density.others,
        )
        try:
            new = self.make_for(request)
        except NonFinite:
            return False
        is_better = new.limits.far_out >= old.limits.far_out / MUCH_SHORTER
        # where log p is all but flat, differences of gradients are rounding errors
        narrowest = (new.fit.metric.diagonal().scales / old.fit.metric.diagonal().scales).min()
        is_better = is_better and bool(narrowest > 1 / MUCH_NARROWER)
        if is_exact and old.fit.is_mode:
            is_better = is_better and new.fit.is_mode
        if not is_better:
            self._use(old)
            self.request = old_request
        return is_better

    def _use(self, setup: Setup) -> None:
        self.current = setup
        rewrites = self._gradient.density.rewrites
        for rewrite, state in zip(rewrites, setup.rewrite_states, strict=True):
            rewrite.restore(state)
        for expansion, anchor in zip(self._expansions, setup.anchors, strict=True):
            if expansion is not None:
                expansion.anchor = anchor

    def make_another(self, start: Array) -> Setup:
        """Take a set-up from here into use, and keep it beside the others."""
        setup = self.make(start)
        self._kept.append(setup)
        return setup

    def make_kept(self, starts: Sequence[Array]) -> None:
        """Keep the set-ups from these points alone, for the chains that will begin there.

        The first of them is in use then.
        """
        self._kept = [self.make(start) for start in starts]
        self.make(starts[0])

    def restore(self, request: SetupRequest) -> None:
        """Take into use what was made for the request of a restored chain."""
        if request != self.request:
            with self._gradient.density.at(request.conditioned_on):
                self.make_for(request)
        self.request = request  # the very same object: the next draw compares no arrays

    def forget(self) -> None:
        """Let the next chain ask for its set-up: the data may have changed."""
        self.request = None

    def start(self, rng: np.random.Generator, widest: float = 2.0) -> Array:
        """Draw a start, as a rule wider spread than the posterior, so that R-hat can tell."""
        for scale in (widest, widest / 2, widest / 4, 0.0):
            position = self.fit.draw(rng, scale * self._temperature**0.5)
            position = position.astype(self._gradient.density.dtype)
            if self.is_finite_at(position):
                break
        return position

    def start_after_divergence(self, rng: np.random.Generator, mean: Array) -> Array:
        """Draw a start from the fit, or begin at the chain's ``mean`` where that isn't a mode."""
        if self.fit.is_mode:
            return self.start(rng, widest=1.0)
        return mean.astype(self._gradient.density.dtype)

    def holds(self, request: SetupRequest) -> bool:
        """Whether what other steps sample has the values for which a set-up was requested."""
        others = self._gradient.density.others
        return all(map(np.array_equal, request.conditioned_on, others))

    def is_finite_at(self, position: Array) -> bool:
        """Whether density and gradient are finite here, on some rows."""
        minibatch = self._gradient.order.probe(np.random.default_rng(0))
        with np.errstate(all="ignore"):
            logp, grad = self._gradient(position, minibatch)
        return bool(np.isfinite(logp) and np.isfinite(grad).all())

    def distance(self, position: Array) -> float:
        """Largest distance of a position from the mean of the fit, in standard deviations."""
        return float(np.abs(self._in_sds(position)).max())

    def radius(self, position: Array) -> float:
        """Distance of a position from the mean of the fit in all directions together."""
        return float(np.linalg.norm(self._in_sds(position)))

    def _in_sds(self, position: Array) -> Array:
        return self.fit.metric.from_theta(position - self.fit.mean)
