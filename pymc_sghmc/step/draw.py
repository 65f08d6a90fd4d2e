"""One draw in the making: its inner steps, their sums, and its statistics. Knows no rule."""

import math

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pymc.stats.convergence import SamplerWarning

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.metric import Array, Metric
from pymc_sghmc.gradients.target import Target
from pymc_sghmc.loops.inner_loops import InnerLoops, InnerSteps
from pymc_sghmc.schedules import Phase
from pymc_sghmc.step.chain import Chain
from pymc_sghmc.tuning.budget import MOST_INNER_STEPS, inner_steps
from pymc_sghmc.tuning.chain_tuning import ChainTuning, Tuning
from pymc_sghmc.tuning.settings import Settings
from pymc_sghmc.tuning.tuner import Tuner

__all__ = ["STATISTICS", "Draw", "DrawLoop", "largest_energy"]

STATISTICS: dict[str, tuple[Any, list[int] | None]] = {
    "learning_rate": (np.float64, []),
    "draw_weight": (np.float64, []),
    "kinetic_temperature": (np.float64, []),
    "configurational_temperature": (np.float64, []),
    "target_temperature": (np.float64, []),
    "gradient_norm": (np.float64, []),
    "gradient_noise": (np.float64, []),
    "friction": (np.float64, []),
    "control_variates": (bool, []),
    "gradient_order": (int, []),
    "inner_steps": (np.int64, []),  # PyMC calls the tree sizes of NUTS n_steps
    "minibatch_logp": (np.float64, []),
    "data_rows": (np.int64, []),  # by which diagnostics see whether a model has these data,
    "data_mark": (np.float64, []),  # and by this, where there are as many rows
    "cycle": (int, []),
    "diverging": (bool, []),
    "divergences": (int, []),  # the dtype that NUTS gives it: both may be in one model
    "warning": (SamplerWarning, None),
}

HOT = 1.5  # times the temperature, from which on a draw is no draw from any posterior, ...
CHANCE = 15.0  # ... and nats by which its energy is too improbable there


def largest_energy(d: int) -> float:
    """Kinetic energy in d directions, over the temperature, above which a chain is astray.

    Momenta are Gaussian, whatever the posterior is: that an energy of mean d/2 exceeds
    d/2 + √(dx) + x has a probability below exp(−x) (Laurent & Massart 2000, lemma 1).
    """
    return HOT * d / 2 + math.sqrt(d * CHANCE) + CHANCE


class Draw:
    """Inner steps of a draw, as they are made.

    Attributes
    ----------
    state : NamedTuple
        After the last of them.
    phase : Phase
        Of the last, or of the one that can't be made.
    settings : dict
        Arguments of ``update`` at the last.
    """

    def __init__(self) -> None:
        # none of these before the first inner step
        self.state: Any = None
        self.phase: Any = None
        self.settings: Any = None
        self.n_steps = 0
        self.weight = 0.0
        self.kinetic = 0.0
        self.logp = math.nan

    @property
    def learning_rate(self) -> float:
        """η, NaN before it is known."""
        return math.nan if self.phase is None else self.phase.learning_rate

    @property
    def kinetic_energy(self) -> float:
        """Mean over the inner steps, about d/2 in a chain that is where it should be."""
        return self.kinetic / (2 * self.n_steps)

    def add(self, steps: InnerSteps) -> None:
        """Take in inner steps that were made in the present phase."""
        eta, _, weight, _ = self.phase
        self.state = steps.state
        self.logp = steps.logp
        self.n_steps += steps.n_steps
        self.weight += steps.n_steps * (eta if weight is None else weight)
        self.kinetic += steps.kinetic / eta

    def statistics(
        self, target: Target, chain: Chain, settings: Settings, names: Iterable[str]
    ) -> dict[str, Any]:
        """Return the statistics of the draw, fields of the sampler's state with ``names`` too."""
        tuning = chain.tuning
        assert tuning is not None
        m = self.n_steps
        d = len(self.state.position)
        return {
            "learning_rate": self.learning_rate,
            "draw_weight": self.weight,
            "kinetic_temperature": self.kinetic / (m * d) if len(self.state) > 1 else math.nan,
            "configurational_temperature": target.virial / (m * d),
            "target_temperature": self.settings["temperature"],
            "gradient_norm": math.sqrt(target.square_norm / m),
            "gradient_noise": settings.noise_share(self.settings, chain.noise),
            "friction": self.settings.get("friction", math.nan),
            "control_variates": tuning.order > 0,
            "gradient_order": tuning.order,
            "inner_steps": m,
            "minibatch_logp": self.logp,
            "data_rows": target.gradient.data.n_data_rows,
            "data_mark": target.gradient.data.data_mark,
            "cycle": self.phase.cycle,
            "diverging": False,
            "divergences": 0,
            "warning": None,
            **{name: float(getattr(self.state, name)) for name in names},
        }

    def statistics_of_fault(self, step: Any, warning: SamplerWarning | None) -> dict[str, Any]:
        """Return the statistics of a draw that couldn't be made."""
        tuning = step.chain.tuning
        order = 0 if tuning is None else tuning.order  # None where the set-up failed
        return dict.fromkeys([*STATISTICS, *step.statistics], math.nan) | {
            "learning_rate": self.learning_rate,
            "draw_weight": 0.0,
            "target_temperature": step.tuner.settings.temperature,
            "control_variates": order > 0,
            "gradient_order": order,
            "inner_steps": self.n_steps,
            "data_rows": step.tuner.gradient.data.n_data_rows,
            "data_mark": step.tuner.gradient.data.data_mark,
            "cycle": 0 if self.phase is None else self.phase.cycle,
            "diverging": True,
            "divergences": 1,
            "warning": warning,
        }


class _End(NamedTuple):
    """Where the last draw ended."""

    state: Any
    position: Array | None  # θ
    in_model: Array | None = None  # the same in the model's own coordinates


class DrawLoop:
    """Makes the inner steps of draws.

    Parameters
    ----------
    sampler : StochasticGradientStep
        Of which ``init``, ``update``, ``restart_every`` and the name are taken.
    tuner : Tuner
    n_steps : int or "auto"
        Inner steps in a draw.
    schedule : callable or None
        Phases by inner step; None: the tuner chooses the learning rate.
    varies : bool
        Whether phases differ from one inner step to the next.
    """

    def __init__(
        self, sampler: Any, tuner: Tuner, n_steps: Any, schedule: Any, varies: bool
    ) -> None:
        self.init = sampler.init
        self.restart_every = sampler.restart_every
        self.loops = InnerLoops(sampler.update, type(sampler).__name__, with_logp=n_steps == 1)
        self.tuner = tuner
        self.n_steps = n_steps
        self.schedule = schedule
        self._varies = varies
        self._end = _End(state=None, position=None)

    def __call__(
        self,
        draw: Draw,
        chain: Chain,
        position: Array,
        target: Target,
        rng: np.random.Generator,
        is_tuning: bool,
    ) -> Array:
        """Make all inner steps, compiled where that can be.

        Parameters
        ----------
        draw : Draw
            New; filled here, as far as it goes.
        chain : Chain
            Its noise and its number of inner steps are brought up to date.
        position : array of shape (d,)
            θ, where the draw begins.
        target : Target
        rng : numpy.random.Generator
        is_tuning : bool

        Returns
        -------
        array of shape (d,)
            θ at the end.

        Raises
        ------
        NonFinite, ChainError
        """
        settings = self.tuner.settings
        T = settings.temperature
        tuning = chain.tuning
        assert tuning is not None
        n_steps = self._n_steps(tuning)
        draw.phase = self.phase(tuning, chain.n_updates)
        chain.noise = settings.noise.begin_draw(chain.noise, target, position, rng, chain.n_draws)
        draw.state = self._state_at(position, chain.state, target, draw.phase, rng)
        while draw.n_steps < n_steps:
            phase = self.phase(tuning, chain.n_updates)
            if self.restart_every and chain.n_updates % self.restart_every == 0:
                draw.state = self.init(
                    draw.state.position, phase.learning_rate, rng, phase.temperature * T
                )
            if draw.settings is None or phase != draw.phase:
                draw.settings = settings.arguments(
                    tuning, chain.noise, phase, position.dtype, is_tuning
                )
            draw.phase = phase
            n = self._n_alike(n_steps - draw.n_steps, chain.n_updates)
            ends = draw.n_steps + n == n_steps
            steps = self.loops(draw.state, n, rng, target, draw.settings, with_logp=ends)
            chain.n_updates += steps.n_steps
            draw.add(steps)
            if steps.failed is not None:
                draw.add(self.loops.again(steps, target, draw.settings))
                chain.n_updates += 1
        position = target.coordinates.to_theta(draw.state.position)
        if self._has_diverged(draw, tuning, position, is_tuning):
            raise NonFinite(position, position, draw.logp)
        self._end = _End(draw.state, position)
        return position

    def _has_diverged(self, draw: Draw, tuning: Tuning, position: Array, is_tuning: bool) -> bool:
        """Whether a draw ended where a chain can't be meant to be, or came by there."""
        if not np.isfinite(position).all():
            return True
        if is_tuning:
            return self.tuner.departures.is_lost(tuning, draw.state, position)
        most = max(1.0, self.tuner.settings.temperature) * largest_energy(position.size)
        return self.tuner.departures.may_send_back(tuning) and draw.kinetic_energy > most

    def remember(self, in_model: Array) -> None:
        """Take in where the last draw ended in model coordinates, as PyMC is told."""
        self._end = self._end._replace(in_model=in_model)

    def known_position(self, state: Any, in_model: Array) -> Array | None:
        """Return the position of a chain's state if the last draw was told to be ``in_model``.

        Changes of coordinates take as long as a gradient, and this saves two of each draw.
        """
        end = self._end
        if state is None or state is not end.state or end.in_model is None:
            return None
        return end.position if end.in_model.tobytes() == in_model.tobytes() else None

    def where_it_was(self, state: Any, target: Target, position: Array, in_model: Array) -> Array:
        """Return the position of a chain's state if that is ``in_model`` in model coordinates.

        The way there and back doesn't end at the very same numbers; ``position`` is its end.
        """
        density = target.gradient.density
        if not density.changes_coordinates or state is None:
            return position
        here = self._theta(state, target.coordinates)
        return here if (density.to_model(here) == in_model).all() else position

    def _theta(self, state: Any, metric: Metric) -> Array:
        """θ of a chain's state; of the last draw's no product with L is needed."""
        if self._end.position is not None and state is self._end.state:
            return self._end.position
        return metric.to_theta(state.position)

    def phase(self, tuning: Tuning, n_updates: int) -> Phase:
        """Learning rate, temperature and weight of an inner step."""
        if self.schedule is not None:
            return self.schedule(n_updates)
        assert isinstance(tuning, ChainTuning)
        assert tuning.learning_rate is not None
        return Phase(tuning.learning_rate)

    def _n_steps(self, tuning: Tuning) -> int:
        if self.n_steps != "auto":
            return self.n_steps
        # a schedule counts inner steps
        return MOST_INNER_STEPS if self.schedule is not None else inner_steps(tuning)

    def _n_alike(self, n: int, n_updates: int) -> int:
        """Inner steps with equal settings, of the next ``n``."""
        if self.restart_every:
            n = min(n, self.restart_every - n_updates % self.restart_every)
        return 1 if self._varies else n

    def _state_at(
        self, position: Array, state: Any, target: Target, phase: Phase, rng: np.random.Generator
    ) -> Any:
        """Return the chain's state, at the position that PyMC hands over."""
        metric = target.coordinates
        if state is None:
            T = phase.temperature * self.tuner.settings.temperature
            return self.init(metric.from_theta(position), phase.learning_rate, rng, T)
        # as a rule it is where the chain was, and no triangular system needs to be solved
        if self._theta(state, metric).tobytes() == position.tobytes():
            return state
        return state._replace(position=metric.from_theta(position))
