"""The choice of settings from a bias budget: laws on a Gaussian, and what a chain measures.

In coordinates in which the posterior has unit scale a gradient with noise of covariance V heats the
chain by an amount that is known exactly on a Gaussian. So V is measured, and the learning rate is
the largest whose predicted bias stays within the budget. Knows no PyMC, no models and no sampler's
name: what there is to know of a rule is read off its ``update``.
"""

import math

from functools import cache
from typing import NamedTuple

import numpy as np

from scipy.optimize import brentq

from pymc_sghmc.tuning import law
from pymc_sghmc.tuning.batch_means import BatchMeans
from pymc_sghmc.tuning.setup_request import SetupRequest

__all__ = [
    "FARTHEST_LEARNING_RATE",
    "MANY",
    "MAX_LEARNING_RATE",
    "MOST_INNER_STEPS",
    "MOST_STRETCH",
    "ChainTuning",
    "choose",
    "critical_friction",
    "inner_steps",
    "largest_learning_rate",
    "score",
    "smallest_friction",
    "worst_noise",
]

MAX_LEARNING_RATE = 0.25  # ε = ½ posterior sd: the curvature may grow 16-fold before BAOAB diverges
FARTHEST_LEARNING_RATE = 1.0  # where it is known that the curvature hardly grows within reach
UNKNOWN_NOISE = 0.25  # share of the noise that a noise estimate or a thermostat may miss
FIXED_ROWS = 50  # that cost as much as all else in a step
MOST_INNER_STEPS = 10  # in a draw
FEWEST_INNER_STEPS = 3
MANY = 1000  # directions, of which the noisiest can't be told
SLOW = 6.0  # draws that an independent one takes: so many are too many, and fine
WANTED = 4.0
MOST_STRETCH = 5.0  # of the inner steps in a draw where draws are too much alike
RELAXED = 4.0  # times of relaxation after which the next draw hardly depends on this one
MIN_FRICTION = 0.01  # the least that Chen et al. use


def critical_friction(eta, curvature=1.0) -> float:
    """α = 1 − exp(−2√(ηh)): the friction at which curvature h relaxes fastest."""
    return max(-math.expm1(-2 * math.sqrt(eta * curvature)), MIN_FRICTION)


def largest_learning_rate(bias, budget, upper=MAX_LEARNING_RATE) -> float:
    """Largest η up to ``upper`` at which the increasing function ``bias(η)`` is within the budget."""
    if bias(upper) <= budget:
        return upper
    lower = upper
    while not bias(lower) <= budget:  # or not a number
        lower /= 16
        if lower < 1e-12:
            return lower

    def excess(log_eta):
        return min(bias(math.exp(log_eta)), 1e9) - budget

    return math.exp(brentq(excess, math.log(lower), math.log(min(16 * lower, upper))))


def smallest_friction(bias, budget, lower) -> float:
    """Smallest α from ``lower`` to 1 at which the decreasing ``bias(α)`` is within the budget, or 1.

    Where a step is unstable with α = 1, more friction is no help, and ``lower`` it is.
    """
    if bias(lower) <= budget * (1 + 1e-9):  # a search for η may have spent it to the last bit
        return lower
    if bias(1.0) >= budget:
        return 1.0 if bias(1.0) < math.inf else lower
    return brentq(lambda alpha: bias(alpha) - budget, lower, 1.0)


def worst_noise(tuning) -> float:
    """Noise in the noisiest direction; of thousands, each measured roughly, it is their mean.

    The largest of thousands of rough numbers says more of their errors, and directions noisier than
    twice the mean got shorter scales in the set-up. That of second order is known exactly.
    """
    is_rough = tuning.order < 2 and tuning.noise.size > MANY
    return float(tuning.noise.mean() if is_rough else tuning.noise.max())


class ChainTuning(NamedTuple):
    """What a chain has measured of its gradient, and the settings that follow from it.

    The noise is that of the gradient in use, in the coordinates of the preconditioner: an average
    with weights growing as t³ over the tuning draws, after what was measured around the centre.
    """

    order: int  # of the gradient in use: 0 plain, 1 control variates, 2 second-order ones
    noise: np.ndarray  # diagonal of V̂, (d,)
    temperatures: list  # of the tuning draws so far
    learning_rate: float | None = None
    friction: float | None = None
    bias: float = math.nan  # predicted, of the variances
    rate: float = math.nan  # predicted relaxation of the slowest mean per inner step
    limit: float = MAX_LEARNING_RATE  # of the learning rate times the stiffness
    n_measured: int = 10  # so many draws is the first measurement worth
    n_divergences: int = 0
    rows: int | None = None  # in a minibatch, where their number is chosen; or groups ...
    rows_of_each: float = 1.0  # ... with so many on average
    request: SetupRequest | None = None  # of the set-up, without its data
    draws: BatchMeans | None = None  # of the later half of the tuning draws
    stretch: float = 1.0  # of the inner steps in a draw, where draws resemble their neighbours

    def with_noise(self, noise, known=None):
        """Take in V̂ of one more draw, unless it overflows on the way from the start.

        With ``known``, what all rows told of it, only the mean over its directions is learnt; where
        that is NaN, each on its own.
        """
        if not np.isfinite(noise).all():
            return self
        n = self.n_measured + 1
        noise = self.noise + (noise - self.noise) * 4 / (n + 3)
        if known is not None:
            of_all = np.isfinite(known)
            level = noise[of_all].mean() / (known[of_all].mean() or 1.0)
            noise = np.where(of_all, known * level, noise)
        return self._replace(n_measured=n, noise=noise)

    def with_temperature(self, temperature, tolerance, stiffness):
        """Take in one draw's; half the learning rate is the limit where their mean is too hot.

        Judged after 32, 64, … draws by the later half and its error from eight batches, so that the
        way from the start and chance don't count.
        """
        self.temperatures.append(temperature)
        n = len(self.temperatures)
        limit = self.limit
        if n >= 32 and n & (n - 1) == 0:
            batches = np.mean(np.reshape(self.temperatures[n // 2 :], (8, -1)), axis=1)
            error = batches.std(ddof=1) / math.sqrt(8)
            if batches.mean() - 1 > 2 * tolerance + 4 * error:
                limit = min(limit, (self.learning_rate or math.inf) * stiffness) / 2
        return self._replace(limit=limit)

    def with_position(self, theta, n_tuned):
        """Take in where a tuning draw ended; begin anew after 32, 64, 128, … of them."""
        if n_tuned >= 32 and n_tuned & (n_tuned - 1) == 0:
            return self.stretched()._replace(draws=BatchMeans.of(n_tuned, theta))
        return self if self.draws is None else self._replace(draws=self.draws.with_draw(theta))

    def stretched(self):
        """Make draws longer if they were too much alike."""
        time = 1.0 if self.draws is None else self.draws.autocorrelation_time()
        if not time > SLOW:
            return self._replace(draws=None)
        return self._replace(draws=None, stretch=min(self.stretch * time / WANTED, MOST_STRETCH))


def choose(
    rule,
    tuning,
    *,
    noise,
    stiffness,
    slowness,
    budget,
    learning_rate=None,
    friction=None,
    least_friction=0.0,
) -> ChainTuning:
    """Choose the largest η and critical α, or the given ones, with a predicted bias in the budget.

    Free are η where no ``learning_rate`` is given, and α where ``rule.update`` takes a friction and
    none is given. Where η is given, α is raised for the budget's sake.

    Parameters
    ----------
    rule : Rule
    tuning : ChainTuning
        Of it the limit of η counts, and how the noise is spread over the directions.
    noise : float
        Largest variance of the gradient, of that which is left in it, over the temperature.
    stiffness, slowness : float
        Largest and smallest curvature of −log p.
    budget : float
        Relative bias of the variances that the choice may cost.
    learning_rate, friction : float, optional
        What is given.
    least_friction : float, default 0.0
        The least α that may be chosen.

    Returns
    -------
    ChainTuning
        With η, α (as it was for a rule without friction), the predicted bias at the stiffest
        direction and the relaxation of the slowest.
    """
    # One thermostat is for all directions, and for all positions: some noise it must miss.
    largest = worst_noise(tuning)
    share = float(tuning.noise.mean()) / largest if largest else 1.0
    mean_noise = noise * min(share, 1 - UNKNOWN_NOISE)
    has_friction = rule.has_friction

    def settings(alpha):
        return {"mean_noise": mean_noise} | ({"friction": alpha} if has_friction else {})

    @cache
    def bias(eta, alpha):
        return law.inflation(rule, eta, stiffness, noise, **settings(alpha))

    def least(eta):
        return friction or max(critical_friction(eta, slowness), least_friction)

    eta = learning_rate
    if eta is None:
        upper = tuning.limit / stiffness
        eta = largest_learning_rate(lambda eta: bias(eta, least(eta)), budget, upper)
    alpha = friction
    if has_friction and friction is None:
        alpha = smallest_friction(lambda alpha: bias(eta, alpha), budget, least(eta))
    chosen = {"friction": alpha} if has_friction else {}
    rate = law.relaxation(rule, eta, slowness, **settings(alpha))
    return tuning._replace(learning_rate=eta, bias=bias(eta, alpha), rate=rate, **chosen)


def score(tuning) -> float:
    """Relaxation per evaluated row: control variates count a minibatch at two points.

    Where the number of rows is chosen, what a step costs whatever it takes counts as some, too.
    """
    points = 1 + (tuning.order > 0)
    if tuning.rows is None:
        return tuning.rate / points
    return tuning.rate / (FIXED_ROWS + points * tuning.rows * tuning.rows_of_each)


def inner_steps(tuning) -> int:
    """Inner steps in a draw: with second-order control variates no more than make draws independent.

    A handful of rows costs less than what PyMC does for a draw; steps of first order are as many as
    ever, so that a draw costs little beside them. More where tuning draws were too much alike.
    """
    if tuning is None:
        return MOST_INNER_STEPS
    n = MOST_INNER_STEPS
    if tuning.order == 2 and 0 < tuning.rate < 1:
        n = math.ceil(RELAXED / -math.log1p(-tuning.rate) - 1e-6)
    return math.ceil(min(max(n, FEWEST_INNER_STEPS), MOST_INNER_STEPS) * tuning.stretch)
