"""Chooses a chain's settings: before its first draw, and from its tuning draws.

At first by the noise of the gradient around the Gaussian fit; after 8, 16, 32, … tuning draws by
what the chain has measured; after a divergence by that. All that is known of a chain is its
`ChainTuning`: methods take one and return a new one. Contains no formula of a sampler.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.gradients.target import Target
from pymc_sghmc.tuning.budget import WITHOUT_NOISE, score
from pymc_sghmc.tuning.chain_tuning import ByHand, ChainTuning, Tuning, is_power_of_two
from pymc_sghmc.tuning.departures import Departures
from pymc_sghmc.tuning.gradient_noise import TunedGradient
from pymc_sghmc.tuning.noise_around import effect_noise_from_all_rows
from pymc_sghmc.tuning.options import options, resized
from pymc_sghmc.tuning.settings import Settings
from pymc_sghmc.tuning.setups import Setups
from pymc_sghmc.tuning.sizes import RowChoice, RowCounts

__all__ = ["Chooser", "Learnt"]

CLEARLY = 1.5  # times as good, for which a chain changes its gradient
OFTEN = 128  # measurements of the noise, one after each tuning draw, before they become rarer, ...
SELDOM = 8  # ... once in so many draws
FIRST_CHOICE = 8  # tuning draws after which settings are chosen anew, then after 16, 32, ...
FIRST_MOVE = 32  # from which on the fit may move, too, ...
BETWEEN = 256  # ... and from here on after 1.5 times as many as well
MOST_QUARTERS = 3  # of the learning rate, before second-order control variates are given up
MAX_DIVERGENCES = 20  # while tuning, each with a quarter of the learning rate before it


class Learnt(NamedTuple):
    """What a tuning draw leaves."""

    tuning: ChainTuning
    state: Any  # that of the draw; None where the metric is new


class Chooser:
    """Chooses the kind of gradient, its rows, learning rate and friction of a chain.

    Parameters
    ----------
    gradients : tuple
        The gradient, and control variates of first and of second order or None, by order.
    settings : Settings
        Of the update rule.
    setups : Setups
    may_change : bool
        Whether the kind of gradient is chosen.
    row_choice : RowChoice
        Whether the number of rows is chosen.
    """

    def __init__(
        self,
        gradients: Sequence[Any],
        settings: Settings,
        setups: Setups,
        *,
        may_change: bool,
        row_choice: RowChoice,
    ) -> None:
        self._gradient: TunedGradient = gradients[0]
        self._gradients = gradients
        self._settings = settings
        self._setups = setups
        self._may_change = may_change
        self._row_choice = row_choice
        self.departures = Departures(settings, setups, gradients[2])

    @property
    def _first_order_noise(self) -> Array:
        """Noise of control variates of first order around the fit, where these may be used."""
        noise = self._setups.made.noise.first_order
        assert noise is not None
        return noise

    def takes_all_rows(self, tuning: Tuning) -> bool:
        """Whether a chain with these settings takes all rows at each step."""
        if tuning.rows is None:
            return self._gradient.is_exact
        return tuning.rows == max(self._gradient.data.n_rows)

    def first(self) -> ChainTuning:
        """Choose by the noise around the fit, and the gradient that mixes faster."""
        data = self._gradient.data
        if self._row_choice is not RowChoice.AS_GIVEN:
            data.resize(None)  # with so many rows the noise was measured
        if self._row_choice is RowChoice.FREE:
            return self._best(self._options(data))
        as_given = self._best(self._options(None))
        if self._row_choice is RowChoice.AS_GIVEN or self._given_rows_serve():
            return as_given
        return self._more_than_given(data) or as_given

    def _options(self, data: RowCounts | None) -> list[ChainTuning]:
        """Return all gradients, with numbers of rows if these are to be chosen, and settings."""
        found = options(
            self._setups.made, self._setups.request, self._may_change, data, self._row_choice
        )
        return [self._chosen(tuning) for tuning in found]

    def _given_rows_serve(self) -> bool:
        """Whether second-order control variates, where the model has them, are safe with these."""
        return self._setups.made.noise.second_order_serves or self._gradients[2] is None

    def _more_than_given(self, data: RowCounts) -> ChainTuning | None:
        """Return settings with more rows than given, if these are clearly better."""
        [n, *_] = data.noisy_batch_sizes
        tunings = self._options(data)
        best = self._best(tunings)
        given = [score(tuning) for tuning in tunings if tuning.rows == n]
        is_safe = best.order == 2 or self.takes_all_rows(best)
        is_better = is_safe or score(best) > CLEARLY * max(given, default=0.0)
        return best if is_better and best.rows != n else None

    def _best(self, tunings: Sequence[ChainTuning]) -> ChainTuning:
        """Return that which mixes fastest, or all rows where that takes little more work.

        Without noise there is no bias, and nothing to measure while tuning: a measurement takes
        twenty gradients, which are slow one by one.
        """
        best = max(tunings, key=score)
        exact = [tuning for tuning in tunings if self.takes_all_rows(tuning)]
        return next((t for t in exact if WITHOUT_NOISE * score(t) > score(best)), best)

    def _chosen(self, tuning: ChainTuning) -> ChainTuning:
        return self._settings.chosen(tuning, self._setups.made)

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

        And after 384, 768, … where the chain has left the fit.

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
            first = self._gradients[1] if tuning.order else None
            from_all_rows = effect_noise_from_all_rows(first, self._setups.made.noise.first_order)
            noise = target.noise_covariance(state.position, rng)
            tuning = tuning.with_noise(noise, from_all_rows)
        relative = temperature / (self._settings.temperature or 1.0)
        tuning = tuning.with_temperature(
            relative, self._settings.target_bias, self._setups.made.curvature.largest
        )
        is_choice = n_tuned >= FIRST_CHOICE and is_power_of_two(n_tuned)
        is_look = is_choice and n_tuned >= FIRST_MOVE
        is_look |= n_tuned >= BETWEEN and n_tuned % 3 == 0 and is_power_of_two(n_tuned // 3)
        if is_look and self.departures.has_moved(tuning, mean, n_tuned):
            start = mean.astype(self._gradient.density.dtype)
            is_exact = self.takes_all_rows(tuning)
            if self._setups.move(start, tuning.made_for.max_order, is_exact):
                new = self.first()
                return Learnt(replace(new, n_divergences=tuning.n_divergences), None)
        if not is_choice:
            return Learnt(tuning, state)
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
        has_other = self._may_change and self._setups.made.noise.first_order is not None
        if has_other and not self.takes_all_rows(tuning):
            tuning = self._reconsidered(tuning, position, rng)
        return self._with_more_rows(tuning)

    def _with_more_rows(self, tuning: ChainTuning) -> ChainTuning:
        """Take more rows where that is clearly better, by the noise that the chain has measured."""
        data = self._gradient.data
        if not self._may_take_more(tuning):
            return tuning
        data.resize(None)
        [given, *_] = data.noisy_batch_sizes
        rows = tuning.rows or given
        now = replace(tuning, rows=rows, rows_of_each=data.rows_of_each)
        others = [self._chosen(other) for other in resized(now, self._setups.made, data)]
        data.resize(tuning.rows)
        best = self._best([now, *others])
        is_better = self.takes_all_rows(best) or score(best) > CLEARLY * score(now)
        return best if is_better else tuning

    def _may_take_more(self, tuning: ChainTuning) -> bool:
        """Whether it may have more rows; than given only if the chain has diverged, or has more."""
        if tuning.order == 2 or self.takes_all_rows(tuning):
            return False
        if self._row_choice is RowChoice.AT_LEAST:
            return tuning.rows is not None or tuning.n_divergences > 0
        return self._row_choice is RowChoice.FREE

    def _reconsidered(
        self, tuning: ChainTuning, position: Array, rng: np.random.Generator
    ) -> ChainTuning:
        """Change to the other gradient where that is clearly better, as far from the fit's mean."""
        other = 1 - tuning.order
        target = Target(self._gradients[other], self._setups.made.metric)
        noise = np.mean([target.noise_covariance(position, rng) for _ in range(4)], axis=0)
        # control variates have no noise at their reference point, and plain minibatches none where
        # a parameter's derivatives vanish, such as a scale's near zero
        around_fit = self._first_order_noise if other else self._setups.made.noise.plain
        noise = np.maximum(noise, around_fit)
        if not np.isfinite(noise).all():
            return tuning
        changed = self._chosen(replace(tuning, order=other, noise=noise, n_measured=4))
        return changed if score(changed) > CLEARLY * score(tuning) else tuning

    def slower(self, tuning: Tuning, initial: Array) -> ChainTuning | None:
        """Return settings with which a chain that diverged may go on.

        Control variates of second order are given up first, unless it is known that they aren't
        the cause; after that the learning rate is a quarter of what it was, or the gradient takes
        more rows. None where the learning rate is given, or after `MAX_DIVERGENCES`. ``initial`` is
        where chains begin as a rule.
        """
        if isinstance(tuning, ByHand) or not self._settings.choose_learning_rate:
            return None
        if tuning.n_divergences >= MAX_DIVERGENCES:
            return None
        limit = tuning.limit / 4
        n_divergences = tuning.n_divergences + 1
        if tuning.order == 2 and self._may_be_sent_off(tuning):
            return self._of_first_order(tuning)
        if self._gradient.density.given_types:
            try:  # what other steps sample may have moved the mode
                self._setups.make(initial, max_order=tuning.made_for.max_order)
            except NonFinite:
                return None
            tuning = self.first()
        slowed = self._chosen(replace(tuning, limit=limit, n_divergences=n_divergences))
        return self._with_more_rows(slowed)

    def _may_be_sent_off(self, tuning: ChainTuning) -> bool:
        """Whether second-order control variates may have sent a chain off.

        Where they are in what rows see, scales that chains are taken to don't make them noisy.
        """
        return not self._gradients[2].knows_distance or tuning.n_divergences >= MOST_QUARTERS

    def _of_first_order(self, tuning: ChainTuning) -> ChainTuning | None:
        """Give up second-order control variates, for a chain that they sent off."""
        request = tuning.made_for
        try:
            with self._gradient.density.at(request.conditioned_on):
                self._setups.make_for(replace(request, max_order=1))
        except NonFinite:
            return None
        new = self.first()
        return replace(new, n_divergences=tuning.n_divergences + 1)
