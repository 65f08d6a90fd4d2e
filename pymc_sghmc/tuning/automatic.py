"""Settings that a step finds itself: before the first draw, and from its tuning draws.

What a chain does, in order: centre, coordinates and noise from the starting point (`setup`, shared
by all chains from there), a start near the centre, settings from the bias budget (`choose`, which
each sampler writes down), and while tuning, after 8, 16, 32, … draws, all of this again from what
the chain has measured. Contains no formula of a sampler.
"""

import logging
import time

from contextlib import suppress

import numpy as np

from pymc.stats.convergence import SamplerWarning, WarningType
from scipy.linalg import solve_triangular

from pymc_sghmc.faults import NonFinite
from pymc_sghmc.gradients.coordinates import PreconditionedGradient
from pymc_sghmc.gradients.thermometer import Thermometer
from pymc_sghmc.tuning.budget import ChainTuning, score
from pymc_sghmc.tuning.setup import near, same_inputs, set_up

__all__ = ["AutomaticSettings"]

FAR = 1.5  # sds in some direction by which the mean of the draws may leave the centre
LOST = 1000.0  # sds in some direction at which a chain can't be meant to be
FEW_DRAWS = 50  # of tuning, too few to measure by
MAX_DIVERGENCES = 20  # while tuning, each with a quarter of the learning rate before it

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it


class AutomaticSettings:
    """Part of a step method: how it comes by the settings that nobody gave."""

    setup = shared_setup = None

    @property
    def needs_setup(self) -> bool:
        """Whether a centre is needed: for control variates, for coordinates or for settings."""
        return (
            self.control_variates is not None
            or isinstance(self.preconditioner, str)
            or self.is_tuned
        )

    @property
    def is_tuned(self) -> bool:
        """Whether some setting follows from measurements of this chain; samplers may extend it."""
        return self.schedule is None or (
            self.control_variates is not None and self.gradient_kind == "auto"
        )

    @property
    def uses_control_variates(self) -> bool:
        """Whether this chain's minibatches are evaluated at two points."""
        return self.tuning is not None and self.tuning.control_variates

    def choose(self, tuning):
        """Choose settings from what is measured of the noise; samplers implement it."""
        raise NotImplementedError

    def prepare(self):
        """Set up and compile for chains from the initial point, once all settings are checked."""
        if self.needs_setup:
            self._prepare_setup()
        self.compile_inner_steps()

    def _prepare_setup(self):
        if 1 in self.gradient.noisy_batch_sizes:
            raise ValueError(
                "batch_size=1: automatic settings need at least 2 rows in a minibatch to measure "
                "how they differ. Raise batch_size."
            )
        began = time.perf_counter()
        try:
            self._set_up(self.initial)
        except NonFinite:
            if self.gradient.odd_values() == "missing values":
                raise ValueError(
                    "The data of the likelihood have missing values. Drop these rows, or impute them "
                    "beforehand."
                ) from None
            return  # pm.sample may start elsewhere; if not, the first draw says what is wrong
        self.shared_setup = self.setup
        _log.info(self.describe(time.perf_counter() - began))
        if not self.setup.centre.is_mode:
            _log.warning(
                f"{type(self).__name__} found no mode around which the posterior is near a Gaussian: "
                "a funnel, a ridge or a flat direction, perhaps. Its settings may be far off, and "
                "temperatures can't show what chains don't reach. Reparametrise the model (groups "
                "non-centred where data are few), pass centre=, or use NUTS; look at R-hat."
            )

    def describe(self, seconds) -> str:
        """Say what was set up and chosen."""
        tuning = self.tuning
        kind = "control variates" if tuning.control_variates else "plain minibatches"
        kind = "all data" if self.gradient.is_exact else kind
        shape = {0: "no", 1: "diagonal", 2: "dense"}[np.ndim(self.factor)]
        settings = f"learning_rate={self._rate():.3g}"
        if tuning.friction is not None:
            settings += f", friction={tuning.friction:.3g}"
        return (
            f"{type(self).__name__}: {kind}, {shape} preconditioner of {self.d} unknown{'s' * (self.d > 1)}, {settings}; "
            f"{100 * tuning.bias:.1f} % bias of variances predicted. Setting up took "
            f"{self.setup.passes:.0f} passes over the data, {seconds:.1f} s."
        )

    def _use(self, gradient):
        """Take minibatches from this gradient from now on."""
        self.meter = Thermometer(gradient)
        self.target, self.quiet = self.meter, gradient
        if self.factor is not None:
            self.target = PreconditionedGradient(self.meter, self.factor)
            self.quiet = PreconditionedGradient(gradient, self.factor)

    def _set_up(self, start, scale=None):
        """Centre, coordinates and noise from here; reused where nothing has changed.

        With a ``scale``, the factor of an earlier centre, ``start`` is the centre.
        """
        optimise = scale is None
        given = (*self.gradient.given, *self.gradient.held)
        key = (start, optimise, given, self.gradient.arrays)
        known = [s for s in (self.setup, self.shared_setup) if s and same_inputs(s.key, key)]
        if known:
            self.setup = known[0]
            if self.control_variates is not None:
                self.control_variates.anchor = self.setup.anchor
        else:
            if not self._is_finite_at(start):
                raise NonFinite(start, start, np.nan)
            self.setup = set_up(
                self.gradient,
                self.control_variates,
                start if self.given_centre is None else self.given_centre,
                key,
                preconditioner=self.preconditioner,
                optimise=optimise and self.given_centre is None,
                temperature=self.temperature,
                scale=scale,
            )
        self.setup_from = self.ready_for = (start, scale, self.gradient.given)
        self.factor, noise, options = self.setup.factor, self.setup.noise, []
        if noise["control_variates"] is not None:
            options.append(self.choose(ChainTuning(True, noise["control_variates"], [])))
        if not options or self.gradient_kind == "auto":
            options.append(self.choose(ChainTuning(False, noise["plain"], [])))
        self.tuning = max(options, key=score)
        self._use(self.control_variates if self.tuning.control_variates else self.gradient)

    def _begin_draw(self, position):
        """Set up at a chain's first draw, or for a restored chain; return where the draw begins."""
        if self.needs_setup and self.setup_from is None:
            self._set_up(position)
            self.centre = self.setup.centre.position
            # far from the centre control variates are noisier than any given learning rate allows
            if self.schedule is None or self.uses_control_variates:
                position = self._jump()
        elif self.needs_setup and self.setup_from is not self.ready_for:
            tuning, now = self.tuning, self.gradient.given
            start, scale, given = self.setup_from
            self.gradient.set_given(given)
            self._set_up(start, scale)
            self.gradient.set_given(now)
            self.tuning = tuning
            self._use(self.control_variates if tuning.control_variates else self.gradient)
        if self.centre is None:
            self.centre = position.astype(float)
        if self.gradient.likelihood_needs_others and self.uses_control_variates:
            self.control_variates.move_anchor()
        return position

    def _jump(self):
        """Draw a start that is wider spread than the posterior, so that R-hat can tell."""
        for scale in (2.0, 1.0, 0.5, 0.0):
            position = near(self.setup.centre, self.rng, scale * self.temperature**0.5)
            position = position.astype(self.gradient.dtype)
            if self._is_finite_at(position):
                break
        return position

    def _measure(self, position, temperature):
        """Learn from a tuning draw; new settings after 8, 16, 32, … of them."""
        if not self.gradient.is_exact:
            self.tuning = self.tuning.with_noise(self.quiet.noise_covariance(position, self.rng))
        relative = temperature / (self.temperature or 1.0)
        self.tuning = self.tuning.with_temperature(relative, self.target_bias)
        n = self.n_tuned
        if n < 8 or n & (n - 1):
            return
        if n >= 32 and self._has_moved():
            n_divergences = self.tuning.n_divergences
            with suppress(NonFinite):  # of the new centre; the old one stays
                self._set_up(self.centre.astype(self.gradient.dtype), self.setup.centre.factor)
                self.tuning = self.tuning._replace(n_divergences=n_divergences)
                self.state = None
                return
        self._revise(position)

    def _revise(self, position):
        """Choose settings anew by what is known of the noise."""
        noise = self.tuning.noise
        if self.uses_control_variates:  # the larger of two estimates is safe, but biased: not for β̂
            noise = np.maximum(noise, self.setup.noise["control_variates"])
        chosen = self.choose(self.tuning._replace(noise=noise))
        self.tuning = chosen._replace(noise=self.tuning.noise)
        if self.control_variates is not None and self.gradient_kind == "auto":
            self._reconsider(position)

    def _shift(self, position):
        """L⁻¹(θ − θ̂): distance from the centre in its own standard deviations."""
        shift, scale = position - self.setup.centre.position, self.setup.centre.factor
        return shift / scale if scale.ndim == 1 else solve_triangular(scale, shift, lower=True)

    def _is_lost(self, position) -> bool:
        """Whether a chain that is free to slow down has run away, long before it overflows."""
        if not (self.tune and self.schedule is None):
            return False
        return not np.abs(self._shift(position)).max() < LOST

    def _has_moved(self) -> bool:
        """Whether the mean of the draws has left the centre, or other unknowns their values."""
        if self.given_centre is not None or self.schedule is not None:
            return False  # the scale of a given learning rate must stay
        if self.gradient.given_types and any(
            not np.array_equal(a, b)
            for a, b in zip(self.setup_from[2], self.gradient.given, strict=True)
        ):
            return True
        return bool(np.abs(self._shift(self.centre)).max() > FAR)

    def _reconsider(self, position):
        """Change to the other gradient where that is clearly better here, far from the centre, say."""
        used = self.tuning.control_variates
        other = self.gradient if used else self.control_variates
        if self.factor is not None:
            other = PreconditionedGradient(other, self.factor)
        noise = np.mean([other.noise_covariance(position, self.rng) for _ in range(4)], axis=0)
        if not used:  # control variates have no noise at their centre: it tells nothing here
            noise = np.maximum(noise, self.setup.noise["control_variates"])
        if not np.isfinite(noise).all():
            return
        changed = self.choose(
            self.tuning._replace(control_variates=not used, noise=noise, n_measured=4)
        )
        if score(changed) > 1.5 * score(self.tuning):
            self.tuning = changed
            self._use(self.gradient if used else self.control_variates)

    def _notice(self):
        """Warn, at the first draw after tuning, of settings that may be wrong."""
        if self.tuning is None or not self.is_tuned:
            return None
        name = type(self).__name__
        if 0 < self.n_tuned < FEW_DRAWS:
            text = (
                f"{name}: tune={self.n_tuned} is too little to measure the gradient's noise by. Its "
                f"settings may be wrong: use at least tune={FEW_DRAWS}, better 500."
            )
        elif self.tuning.bias > 2 * self.target_bias:
            text = (
                f"{name}: variances are predicted to come out {100 * self.tuning.bias:.0f} % too large "
                "at the given settings. Lower learning_rate, or leave it to the step."
            )
        else:
            return None
        return SamplerWarning(WarningType.BAD_PARAMS, text, "warn", self.n_updates)

    def _can_slow_down(self) -> bool:
        """Whether the chain may go on from near the centre with a quarter of the learning rate."""
        free = self.tune and self.schedule is None and self.tuning is not None
        if not free or self.tuning.n_divergences >= MAX_DIVERGENCES:
            return False
        slower = {"limit": self.tuning.limit / 4, "n_divergences": self.tuning.n_divergences + 1}
        if self.gradient.given_types:
            try:  # the other unknowns may have moved the mode
                self._set_up(self.initial)
            except NonFinite:
                return False
        self.tuning = self.choose(self.tuning._replace(**slower))
        self.state = None
        return True
