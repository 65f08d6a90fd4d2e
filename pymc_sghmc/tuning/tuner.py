"""Prepares chains: what they start from, and what each of their draws begins with.

Before the first draw a set-up is made (`setup`): a Gaussian fit, a metric, and the noise of the
gradient around the fit. The chain starts near the fit's mean, with settings by the `Chooser`, which
chooses them anew while tuning. Contains no formula of a sampler.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.metric import Array, Identity, Metric, preconditioner_metric
from pymc_sghmc.gradients.target import Target
from pymc_sghmc.tuning.chain_tuning import ByHand, ChainTuning, Tuning
from pymc_sghmc.tuning.chooser import Chooser
from pymc_sghmc.tuning.departures import Departures
from pymc_sghmc.tuning.gradient_noise import TunedGradient
from pymc_sghmc.tuning.limits import see_limits
from pymc_sghmc.tuning.modes import FoundModes, number_of_chain, starts_in_modes
from pymc_sghmc.tuning.pool_report import PoolReport, pool_report
from pymc_sghmc.tuning.settings import Settings
from pymc_sghmc.tuning.setup import Setup
from pymc_sghmc.tuning.setups import Setups
from pymc_sghmc.tuning.sizes import RowChoice

__all__ = ["Points", "Start", "Tuner"]

SAME_START = 0.4  # power of the precision of numbers, within which two starts are the same


class Points(NamedTuple):
    """Points that a tuner is given, (d,) each."""

    initial: Array  # where chains begin as a rule
    is_initial_given: bool = False  # by the user: chains aren't spread over modes then
    reference: Array | None = None  # of control variates, instead of the mode


class Start(NamedTuple):
    """How a draw begins."""

    tuning: Tuning
    position: Array  # (d,)


class Tuner:
    """Makes set-ups and first settings of chains, and what ``update`` is given in each draw.

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
    row_choice : RowChoice
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
        row_choice: RowChoice = RowChoice.AS_GIVEN,
    ) -> None:
        self.gradient = gradient
        self.gradients = (gradient, *expansions)  # by order
        self.settings = settings
        self.initial = points.initial
        self.start_is_given = points.is_initial_given
        self.modes = FoundModes([self.initial])
        has_choice = gradient.order.independent and not gradient.is_exact
        if row_choice is RowChoice.AT_LEAST:  # a single number
            has_choice = has_choice and len(set(gradient.data.noisy_batch_sizes)) == 1
        self.row_choice = row_choice if has_choice else RowChoice.AS_GIVEN
        has_expansions = any(expansion is not None for expansion in expansions)
        may_change = has_expansions and kind == "auto"
        estimates = settings.noise.is_tuned and not gradient.is_exact
        self.is_tuned = settings.are_free or may_change or estimates
        self.needs_setup = (
            has_expansions
            or isinstance(preconditioner, str)
            or self.is_tuned
            or self.row_choice is RowChoice.FREE
            or any(rewrite.is_placed for rewrite in gradient.density.rewrites)
        )
        self.setups = Setups(
            gradient,
            expansions,
            preconditioner=preconditioner,
            reference_point=points.reference,
            temperature=settings.temperature,
            row_choice=self.row_choice,
        )
        self.chooser = Chooser(
            self.gradients,
            settings,
            self.setups,
            may_change=may_change,
            row_choice=self.row_choice,
        )
        metric: Metric = Identity(gradient.density.d)
        if isinstance(preconditioner, np.ndarray):
            metric = preconditioner_metric(preconditioner, metric.size)
        self._target = Target(gradient, metric.astype(gradient.density.dtype))

    @property
    def departures(self) -> Departures:
        """What tells chains that have left the fit."""
        return self.chooser.departures

    @property
    def setup(self) -> Setup | None:
        """Gaussian fit, metric and noise in use, or None."""
        return self.setups.current

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
        setup = self.setups.made
        gradient = self.gradients[tuning.order]
        return pool_report(gradient, tuning.noise, tuning.rows, setup.fit, setup.metric)

    def takes_all_rows(self, tuning: Tuning) -> bool:
        """Whether a chain with these settings takes all rows at each step."""
        return self.chooser.takes_all_rows(tuning)

    @property
    def given_rows(self) -> int:
        """The number of rows in a minibatch that was given, where it is one for all groups."""
        data = self.gradient.data
        sizes = [group.batch_size for group in data.groups]
        return min(n for n, all_rows in zip(sizes, data.n_rows, strict=True) if n < all_rows)

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
        see_limits(self.setups, self.gradients[2])
        self.modes = FoundModes([self.initial])
        if self.settings.choose_learning_rate and self.setups.reference_point is None:
            self.modes = starts_in_modes(self.setups, self.gradient, self.initial)
            self.setups.make_kept([self.initial] if self.start_is_given else self.modes.starts)
        return self.chooser.first()

    def _start(self, position: Array, rng: np.random.Generator) -> Array:
        """Return where a chain begins that PyMC starts here: in each of the modes in turn."""
        # the way into other coordinates and back doesn't end at the very same numbers
        same = float(np.finfo(self.gradient.density.dtype).eps ** SAME_START)
        if not np.allclose(position, self.initial, rtol=same, atol=same):
            return position
        if self.start_is_given or np.array_equal(self.modes.starts, [self.initial]):
            return self.initial  # for which there is a set-up
        return self.modes.starts[number_of_chain(rng) % len(self.modes.starts)]

    def begin_draw(self, tuning: Tuning | None, position: Array, rng: np.random.Generator) -> Start:
        """Set up at a chain's first draw, or for a restored chain; return where the draw begins."""
        if not self.needs_setup:
            return Start(ByHand(), position)
        if tuning is None:
            position = self._start(position, rng)
            self.setups.make(position)
            tuning = self.chooser.first()
            # far from the reference point control variates are noisier than any given learning
            # rate allows
            if self.settings.choose_learning_rate or tuning.order:
                position = self.setups.start(rng)
        else:
            assert isinstance(tuning, ChainTuning)
            self.setups.restore(tuning.made_for)
        self.setups.follow(position)
        if self.gradient.density.likelihood_needs_others and tuning.order:
            self.gradients[tuning.order].move_anchor()
        return Start(tuning, position)
