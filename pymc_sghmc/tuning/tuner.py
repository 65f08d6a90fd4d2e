"""Settings that a step chooses itself: before the first draw, and from its tuning draws.

Before the first draw a set-up is made (`setup`): a Gaussian fit, a metric, and the noise of the
gradient around the fit. The chain starts near the fit's mean, and the bias budget (`budget`) gives
its learning rate and friction. After 8, 16, 32, … tuning draws these are chosen again, by what the
chain has measured. That is its `ChainTuning`: methods take one and return a new one.
Contains no formula of a sampler.
"""

import math

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.metric import Array, Identity, Metric, preconditioner_metric
from pymc_sghmc.gradients.target import Target
from pymc_sghmc.tuning.budget import WITHOUT_NOISE, score
from pymc_sghmc.tuning.chain_tuning import (
    MAX_AUTOCORRELATION_TIME,
    ByHand,
    ChainTuning,
    Tuning,
    is_power_of_two,
)
from pymc_sghmc.tuning.modes import number_of_chain, starts_in_modes
from pymc_sghmc.tuning.noise_around import effect_noise_from_all_rows
from pymc_sghmc.tuning.options import options, resized
from pymc_sghmc.tuning.pool_report import PoolReport, pool_report
from pymc_sghmc.tuning.settings import Settings
from pymc_sghmc.tuning.setup import Setup, TunedGradient
from pymc_sghmc.tuning.setup_request import SetupRequest
from pymc_sghmc.tuning.setups import Setups

__all__ = ["Learnt", "Points", "Start", "Tuner"]

FAR = 1.5  # sds in some direction by which the mean of the draws may leave the fit's mean, ...
# ... and chance beside that: n draws' mean with weights growing as t³ has the variance 16/(7n), as
# many times as draws an independent one takes
CHANCE = 16 / 7 * MAX_AUTOCORRELATION_TIME
LOST = 1000.0  # sds in some direction at which a chain can't be meant to be
SAME_START = 0.4  # power of the precision of numbers, within which two starts are the same
CLEARLY = 1.5  # times as good, for which a chain changes its gradient
OFTEN = 128  # measurements of the noise, one after each tuning draw, before they become rarer, ...
SELDOM = 8  # ... once in so many draws
FIRST_CHOICE = 8  # tuning draws after which settings are chosen anew, then after 16, 32, ...
FIRST_MOVE = 32  # from which on the fit may move, too
MOST_QUARTERS = 3  # of the learning rate, before second-order control variates are given up
MAX_DIVERGENCES = 20  # while tuning, each with a quarter of the learning rate before it


class Points(NamedTuple):
    """Points that a tuner is given, (d,) each."""

    initial: Array  # where chains begin as a rule
    is_initial_given: bool = False  # by the user: chains aren't spread over modes then
    reference: Array | None = None  # of control variates, instead of the mode


class Start(NamedTuple):
    """How a draw begins."""

    tuning: Tuning
    position: Array  # (d,)


class Learnt(NamedTuple):
    """What a tuning draw leaves."""

    tuning: ChainTuning
    state: Any  # that of the draw; None where the metric is new


class Tuner:
    """Chooses fit, metric, the kind of gradient, learning rate and friction of chains.

    Parameters
    ----------
    gradient : TunedGradient
    expansions : tuple
        Control variates of first and of second order, or None where they may not be used.
    settings : Settings
        Of the update rule.
    preconditioner : {"auto", "diag", "dense"}, array or None
        An array is M⁻¹.
    kind : {"auto", "plain", "control_variates", "second_order"}
        As given.
    points : Points
    finds_rows : bool, default False
        Whether the number of rows is chosen, too.
    """

    def __init__(
        self,
        gradient: TunedGradient,
        expansions: Sequence[Any],
        settings: Settings,
        *,
        preconditioner: Any,
        kind: str,
        points: Points,
        finds_rows: bool = False,
    ) -> None:
        self.gradient = gradient  # the latter by order
        self.gradients = (gradient, *expansions)
        self.settings = settings
        self.initial = points.initial
        self.start_is_given = points.is_initial_given
        self.modes = [self.initial]  # a start in each, for chains in turn
        self.finds_rows = finds_rows and gradient.order.independent and not gradient.is_exact
        has_expansions = any(expansion is not None for expansion in expansions)
        self.may_change = has_expansions and kind == "auto"
        estimates = settings.noise.is_tuned and not gradient.is_exact
        self.is_tuned = settings.are_free or self.may_change or estimates
        self.needs_setup = (
            has_expansions
            or isinstance(preconditioner, str)
            or self.is_tuned
            or self.finds_rows
            or any(rewrite.is_placed for rewrite in gradient.density.rewrites)
        )
        self.setups = Setups(
            gradient,
            expansions,
            preconditioner=preconditioner,
            reference_point=points.reference,
            temperature=settings.temperature,
            finds_rows=self.finds_rows,
        )
        metric: Metric = Identity(gradient.density.d)
        if isinstance(preconditioner, np.ndarray):
            metric = preconditioner_metric(preconditioner, metric.size)
        self._target = Target(gradient, metric.astype(gradient.density.dtype))

    @property
    def setup(self) -> Setup | None:
        """Gaussian fit, metric and noise in use, or None."""
        return self.setups.current

    @property
    def _made(self) -> Setup:
        """The set-up in use, once there is one."""
        assert self.setups.current is not None
        return self.setups.current

    @property
    def _first_order_noise(self) -> Array:
        """Noise of control variates of first order around the fit, where these may be used."""
        noise = self._made.noise.first_order
        assert noise is not None
        return noise

    def target(self, tuning: Tuning) -> Target:
        """Return what ``update`` is given for a gradient with these settings."""
        if tuning.rows != self.gradient.data.rows:
            self.gradient.data.resize(tuning.rows)
        setup = self.setups.current
        metric = self._target.coordinates if setup is None else setup.metric
        gradient = self.gradients[tuning.order]
        if self._target.gradient is not gradient or self._target.coordinates is not metric:
            self._target = Target(gradient, metric)
        return self._target

    def pool_report(self, tuning: Tuning | None) -> PoolReport | None:
        """Return what drawing from a pool of rows does to a chain; None without a pool."""
        if not isinstance(tuning, ChainTuning):
            return None
        setup = self._made
        gradient = self.gradients[tuning.order]
        return pool_report(gradient, tuning.noise, tuning.rows, setup.fit, setup.metric)

    def takes_all_rows(self, tuning: Tuning) -> bool:
        """Whether a chain with these settings takes all rows at each step."""
        if tuning.rows is None:
            return self.gradient.is_exact
        return tuning.rows == max(self.gradient.data.n_rows)

    def begin_chain(self) -> None:
        """Forget the last chain; read the data anew, as ``pm.set_data`` may have changed them."""
        self.setups.forget()
        self.gradient.data.reload()

    def prepare(self) -> ChainTuning:
        """Set up for chains from the initial point, and return their first settings."""
        points = self.initial, self.setups.reference_point
        for rewrite in self.gradient.density.rewrites:
            points = rewrite.choose(self.gradient, *points)
        self.initial, self.setups.reference_point = points
        self.setups.make_kept([self.initial])
        self.modes = [self.initial]
        if self.settings.learning_rate is None and self.setups.reference_point is None:
            self.modes = starts_in_modes(self.setups, self.gradient, self.initial)
            self.setups.make_kept([self.initial] if self.start_is_given else self.modes)
        return self._first_settings()

    def _start(self, position: Array, rng: np.random.Generator) -> Array:
        """Return where a chain begins that PyMC starts here: in each of the modes in turn."""
        # the way into other coordinates and back doesn't end at the very same numbers
        same = float(np.finfo(self.gradient.density.dtype).eps ** SAME_START)
        if not np.allclose(position, self.initial, rtol=same, atol=same):
            return position
        if self.start_is_given or np.array_equal(self.modes, [self.initial]):
            return self.initial  # for which there is a set-up
        return self.modes[number_of_chain(rng) % len(self.modes)]

    def begin_draw(self, tuning: Tuning | None, position: Array, rng: np.random.Generator) -> Start:
        """Set up at a chain's first draw, or for a restored chain; return where the draw begins."""
        if not self.needs_setup:
            return Start(ByHand(), position)
        if tuning is None:
            position = self._start(position, rng)
            self.setups.make(position)
            tuning = self._first_settings()
            # far from the reference point control variates are noisier than any given learning
            # rate allows
            if self.settings.learning_rate is None or tuning.order:
                position = self.setups.start(rng)
        else:
            self.setups.restore(_request(tuning))
        self.setups.follow(position)
        if self.gradient.density.likelihood_needs_others and tuning.order:
            self.gradients[tuning.order].move_anchor()
        return Start(tuning, position)

    def _first_settings(self) -> ChainTuning:
        """Choose by the noise around the fit, and the gradient that mixes faster."""
        data = self.gradient.data if self.finds_rows else None
        if data is not None:
            data.resize(None)  # with so many rows the noise was measured
        tunings = options(self._made, self.setups.request, self.may_change, data)
        return self._best([self._chosen(tuning) for tuning in tunings])

    def _best(self, tunings: Sequence[ChainTuning]) -> ChainTuning:
        """Return that which mixes fastest, or all rows where that takes little more work.

        Without noise there is no bias, and nothing to measure while tuning: a measurement takes
        twenty gradients, which are slow one by one.
        """
        best = max(tunings, key=score)
        exact = [tuning for tuning in tunings if self.takes_all_rows(tuning)]
        return next((t for t in exact if WITHOUT_NOISE * score(t) > score(best)), best)

    def _chosen(self, tuning: ChainTuning) -> ChainTuning:
        return self.settings.chosen(tuning, self._made)

    def measured(
        self,
        tuning: ChainTuning,
        target: Target,
        state: Any,
        *,
        temperature: float,
        n_tuned: int,
        mean: Array,
        rng: np.random.Generator,
    ) -> Learnt:
        """Learn from a tuning draw; new settings after 8, 16, 32, … of them.

        Parameters
        ----------
        tuning : ChainTuning
        target : Target
            That of the draw.
        state : NamedTuple
            At its end.
        temperature : float
            Configurational, of the draw.
        n_tuned : int
            Tuning draws of the chain so far.
        mean : array of shape (d,)
            Of these draws.
        rng : numpy.random.Generator

        Returns
        -------
        Learnt
        """
        if self._measures_noise(tuning, n_tuned):
            first = self.gradients[1] if tuning.order else None
            from_all_rows = effect_noise_from_all_rows(first, self._made.noise.first_order)
            noise = target.noise_covariance(state.position, rng)
            tuning = tuning.with_noise(noise, from_all_rows)
        relative = temperature / (self.settings.temperature or 1.0)
        tuning = tuning.with_temperature(
            relative, self.settings.target_bias, self._made.curvature.largest
        )
        if n_tuned < FIRST_CHOICE or not is_power_of_two(n_tuned):
            return Learnt(tuning, state)
        if n_tuned >= FIRST_MOVE and self._has_moved(tuning, mean, n_tuned):
            start = mean.astype(self.gradient.density.dtype)
            is_exact = self.takes_all_rows(tuning)
            if self.setups.move(start, _request(tuning).max_order, is_exact):
                new = self._first_settings()
                return Learnt(replace(new, n_divergences=tuning.n_divergences), None)
        return Learnt(self.revised(tuning, state.position, rng), state)

    def _measures_noise(self, tuning: ChainTuning, n_tuned: int) -> bool:
        """Whether the noise is measured after this tuning draw; that takes longer than a draw."""
        if self.takes_all_rows(tuning) or tuning.order == 2:  # of second order it is known exactly
            return False
        return tuning.n_measured < OFTEN or n_tuned % SELDOM == 0

    def revised(
        self, tuning: ChainTuning, position: Array, rng: np.random.Generator
    ) -> ChainTuning:
        """Choose settings anew by what is known of the noise, and the gradient if one is better."""
        noise = tuning.noise
        if tuning.order == 1:  # the larger of two estimates is safe, but biased: not for β̂
            noise = np.maximum(noise, self._first_order_noise)
        # what was measured stays apart from what is safe to choose by
        tuning = replace(self._chosen(replace(tuning, noise=noise)), noise=tuning.noise)
        has_other = self.may_change and self._made.noise.first_order is not None
        if has_other and not self.takes_all_rows(tuning):
            tuning = self._reconsidered(tuning, position, rng)
        return self._with_more_rows(tuning)

    def _with_more_rows(self, tuning: ChainTuning) -> ChainTuning:
        """Take more rows where that is clearly better, by the noise that the chain has measured."""
        data = self.gradient.data
        if not self.finds_rows or tuning.order == 2 or self.takes_all_rows(tuning):
            return tuning
        data.resize(None)
        others = [self._chosen(other) for other in resized(tuning, self._made, data)]
        data.resize(tuning.rows)
        best = self._best([tuning, *others])
        is_better = self.takes_all_rows(best) or score(best) > CLEARLY * score(tuning)
        return best if is_better else tuning

    def _reconsidered(
        self, tuning: ChainTuning, position: Array, rng: np.random.Generator
    ) -> ChainTuning:
        """Change to the other gradient where that is clearly better, as far from the fit's mean."""
        other = 1 - tuning.order
        target = Target(self.gradients[other], self._made.metric)
        noise = np.mean([target.noise_covariance(position, rng) for _ in range(4)], axis=0)
        # control variates have no noise at their reference point, and plain minibatches none where
        # a parameter's derivatives vanish, such as a scale's near zero
        around_fit = self._first_order_noise if other else self._made.noise.plain
        noise = np.maximum(noise, around_fit)
        if not np.isfinite(noise).all():
            return tuning
        changed = self._chosen(replace(tuning, order=other, noise=noise, n_measured=4))
        return changed if score(changed) > CLEARLY * score(tuning) else tuning

    def slower(self, tuning: Tuning) -> ChainTuning | None:
        """Return settings with which a chain that diverged may go on.

        Control variates of second order are given up first, unless it is known that they aren't
        the cause; after that the learning rate is a quarter of what it was, or the gradient takes
        more rows. None where the learning rate is given, or after `MAX_DIVERGENCES`.
        """
        if isinstance(tuning, ByHand) or self.settings.learning_rate is not None:
            return None
        if tuning.n_divergences >= MAX_DIVERGENCES:
            return None
        limit = tuning.limit / 4
        n_divergences = tuning.n_divergences + 1
        if tuning.order == 2 and self._may_be_sent_off(tuning):
            return self._of_first_order(tuning)
        if self.gradient.density.given_types:
            try:  # what other steps sample may have moved the mode
                self.setups.make(self.initial, max_order=_request(tuning).max_order)
            except NonFinite:
                return None
            tuning = self._first_settings()
        slowed = self._chosen(replace(tuning, limit=limit, n_divergences=n_divergences))
        return self._with_more_rows(slowed)

    def may_send_back(self, tuning: Tuning) -> bool:
        """Whether a chain that diverges after tuning may go on with its settings, elsewhere.

        As a divergence of NUTS it is counted, and the run warns. Not where the user gave the
        learning rate, or without a fit to begin from.
        """
        if isinstance(tuning, ByHand) or self.settings.learning_rate is not None:
            return False
        return self._made.fit.is_mode

    def _may_be_sent_off(self, tuning: ChainTuning) -> bool:
        """Whether second-order control variates may have sent a chain off.

        Where they are in what rows see, scales that chains are taken to don't make them noisy.
        """
        return not self.gradients[2].knows_distance or tuning.n_divergences >= MOST_QUARTERS

    def _of_first_order(self, tuning: ChainTuning) -> ChainTuning | None:
        """Give up second-order control variates, for a chain that they sent off."""
        request = _request(tuning)
        try:
            with self.gradient.density.at(request.conditioned_on):
                self.setups.make(request.start, request.metric, max_order=1)
        except NonFinite:
            return None
        new = self._first_settings()
        return replace(new, n_divergences=tuning.n_divergences + 1)

    def is_lost(self, tuning: Tuning, state: Any, theta: Array) -> bool:
        """Whether a chain that is free to slow down has run away, long before it overflows."""
        if self.settings.learning_rate is not None:
            return False
        return self.is_far(tuning, state, theta) or not self.setups.distance(theta) < LOST

    def is_far(self, tuning: Tuning, state: Any, theta: Array) -> bool:
        """Whether a chain is so far out that second-order control variates may send it off."""
        if tuning.order < 2:
            return False
        setup = self._made
        T = self.settings.temperature
        limit = (4 * math.sqrt(theta.size) + 10) * math.sqrt(T)
        if setup.mean_phi is None:
            radius = self.setups.radius(theta)
        else:
            radius = np.linalg.norm(state.position - setup.mean_phi)
        if radius < limit:
            return False
        # scales may be far out where what rows see of the effects isn't
        second = self.gradients[2]
        return not (second.knows_distance and second.distance(theta) < limit)

    def _has_moved(self, tuning: ChainTuning, mean: Array, n_tuned: int) -> bool:
        """Whether the mean of the draws has left that of the fit, or other steps their values.

        By more than chance: among hundreds of directions few draws leave it in some.
        """
        if self.setups.reference_point is not None or self.settings.learning_rate is not None:
            return False  # the scale of a given learning rate must stay
        if not all(
            map(np.array_equal, _request(tuning).conditioned_on, self.gradient.density.others)
        ):
            return True
        by_chance = math.sqrt(2 * math.log(2 * mean.size) * CHANCE / n_tuned)
        return self.setups.distance(mean) > math.hypot(FAR, by_chance)


def _request(tuning: Tuning) -> SetupRequest:
    """Request for the set-up that a chain uses."""
    assert isinstance(tuning, ChainTuning)
    assert tuning.request is not None
    return tuning.request
