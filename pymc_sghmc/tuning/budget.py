"""The choice of learning rate and friction from a bias budget.

In coordinates in which the posterior has unit scale, a gradient with noise of covariance V makes
the variances of a chain too large by an amount that is known exactly on a Gaussian. So V is
measured, and the learning rate is the largest whose predicted bias stays within the budget. Knows
no PyMC, no models and no sampler's name: everything about a rule is computed from its ``update``.
"""

import math

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from scipy.optimize import brentq

from pymc_sghmc.tuning import linear_step
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE, ByHand, ChainTuning, Tuning
from pymc_sghmc.tuning.curvature import Curvature

__all__ = [
    "FARTHEST_LEARNING_RATE",
    "MANY",
    "MOST_INNER_STEPS",
    "WITHOUT_NOISE",
    "choose",
    "critical_friction",
    "inner_steps",
    "largest_learning_rate",
    "lowered_friction",
    "score",
    "smallest_friction",
    "work_of_step",
    "worst_noise",
]

WITHOUT_NOISE = 2.0  # times as much work as with noise, for which a step takes all rows
FARTHEST_LEARNING_RATE = 1.0  # where it is known that the curvature hardly grows within reach
UNKNOWN_NOISE = 0.25  # share of the noise that a noise estimate or a thermostat may miss
# What else costs as much as so many rows at one point, of some 0.05 µs each:
ROWS_OF_DRAW = 2000  # what PyMC and a step do for each draw
ROWS_OF_STEP = 300  # what an inner step does in any case, ...
SQUARED_PER_ROW = 50  # ... and multiplications by matrices, of d² or, for many, of few directions
DIRECTIONS = 100  # times d, that products with few directions take
MOST_INNER_STEPS = 10  # in a draw
FEWEST_INNER_STEPS = 3
MANY = 1000  # directions, of which the noisiest can't be told
ALL = 1 - 1e-9  # the largest contraction of a step that has a logarithm
RELAXED = 4.0  # relaxation times after which the next draw hardly depends on this one
MIN_FRICTION = 0.01  # the least that Chen et al. use
WIDER = 4.0  # times the variance that a fit promises, for which friction is critical where the
#   curvature may change: far out along a scale its effects are as much wider
LITTLE = 0.2  # of the bias budget, that lower friction may spend: far out there is more noise


def critical_friction(eta: float, curvature: float = 1.0) -> float:
    """α = 1 − exp(−2√(ηh)): the friction at which the mean contracts fastest at curvature h."""
    return max(-math.expm1(-2 * math.sqrt(eta * curvature)), MIN_FRICTION)


def largest_learning_rate(
    bias: Callable[[float], float], budget: float, upper: float = MAX_LEARNING_RATE
) -> float:
    """Largest η up to ``upper`` at which the increasing ``bias(η)`` is within the budget."""
    if bias(upper) <= budget:
        return upper
    lower = upper
    while not bias(lower) <= budget:  # or not a number
        lower /= 16
        if lower < 1e-12:
            return lower

    def excess(log_eta: float) -> float:
        return min(bias(math.exp(log_eta)), 1e9) - budget

    return math.exp(brentq(excess, math.log(lower), math.log(min(16 * lower, upper))))


def smallest_friction(bias: Callable[[float], float], budget: float, lower: float) -> float:
    """Smallest α from ``lower`` to 1 at which the decreasing ``bias(α)`` is in the budget, or 1.

    Where a step is unstable with α = 1, more friction is no help, and ``lower`` it is.
    """
    if bias(lower) <= budget * (1 + 1e-9):  # a search for η may have spent it to the last bit
        return lower
    if bias(1.0) >= budget:
        return 1.0 if bias(1.0) < math.inf else lower
    return brentq(lambda alpha: bias(alpha) - budget, lower, 1.0)


def lowered_friction(
    bias: Callable[[float], float], budget: float, lower: float, upper: float
) -> float:
    """Smallest α from ``lower`` to ``upper`` with ``bias(α)`` in the budget, or ``upper``."""
    if lower >= upper or bias(upper) >= budget:
        return upper
    if bias(lower) <= budget:
        return lower
    return brentq(lambda alpha: bias(alpha) - budget, lower, upper)


def worst_noise(tuning: ChainTuning) -> float:
    """Noise in the noisiest direction; of thousands, each measured roughly, it is their mean.

    The largest of thousands of rough numbers says more of their errors, and directions noisier than
    twice the mean got shorter scales in the set-up. That of second order is known exactly.
    """
    is_rough = tuning.order < 2 and tuning.noise.size > MANY
    return float(tuning.noise.mean() if is_rough else tuning.noise.max())


def choose(
    rule: linear_step.Rule,
    tuning: ChainTuning,
    *,
    noise: float,
    curvature: Curvature,
    budget: float,
    learning_rate: float | None = None,
    friction: float | None = None,
    least_friction: float = 0.0,
) -> ChainTuning:
    """Choose the largest η and critical α, or the given ones, with a predicted bias in the budget.

    Where the curvature isn't known to be alike wherever chains come, α is critical for directions
    that are wider than the fit promises, as far as a part of the budget allows. A chain with more
    friction than that takes far longer in them, and one with less at most twice as long in others.

    Free are η where no ``learning_rate`` is given, and α where ``rule.update`` takes a friction and
    none is given. Where η is given, α is raised for the budget's sake.

    Parameters
    ----------
    rule : Rule
    tuning : ChainTuning
        Its limit of η is used, and how its noise is spread over the directions.
    noise : float
        Largest variance of the gradient that no noise estimate removes, over the temperature.
    curvature : Curvature
        Of −log p.
    budget : float
        Relative bias of the variances that the choice may cost.
    learning_rate, friction : float, optional
        Of the user; by default they are chosen.
    least_friction : float, default 0.0
        The least α that may be chosen.

    Returns
    -------
    ChainTuning
        With η, α (as it was for a rule without friction), the predicted bias in the direction of
        the largest curvature and the contraction in that of the smallest, or of wider ones.
    """
    # One thermostat is for all directions, and for all positions: some noise it must miss.
    largest = worst_noise(tuning)
    share = float(tuning.noise.mean()) / largest if largest else 1.0
    mean_noise = noise * min(share, 1 - UNKNOWN_NOISE)
    has_friction = rule.has_friction

    def settings(alpha: float | None) -> dict[str, Any]:
        return {"mean_noise": mean_noise} | ({"friction": alpha} if has_friction else {})

    @cache
    def bias(eta: float, alpha: float | None) -> float:
        return linear_step.variance_bias(rule, eta, curvature.largest, noise, **settings(alpha))

    def least(eta: float) -> float:
        return friction or max(critical_friction(eta, curvature.smallest), least_friction)

    is_known = tuning.limit > MAX_LEARNING_RATE
    slowest = min(curvature.smallest, curvature.largest / (1.0 if is_known else WIDER))

    eta = learning_rate
    if eta is None:
        upper = tuning.limit / curvature.largest
        eta = largest_learning_rate(lambda eta: bias(eta, least(eta)), budget, upper)
    alpha = friction
    if has_friction and friction is None:
        usual = smallest_friction(lambda alpha: bias(eta, alpha), budget, least(eta))
        lower = max(critical_friction(eta, slowest), least_friction)
        alpha = lowered_friction(lambda alpha: bias(eta, alpha), LITTLE * budget, lower, usual)
    rate = linear_step.contraction_rate(rule, eta, slowest, **settings(alpha))
    return replace(
        tuning,
        learning_rate=eta,
        friction=alpha if has_friction else tuning.friction,
        bias=bias(eta, alpha),
        rate=rate,
    )


def score(tuning: ChainTuning) -> float:
    """Contraction per evaluated row: control variates count a minibatch at two points.

    Where the number of rows is chosen it is that of a draw, up to what makes the next hardly depend
    on it, per time: what a draw and a step cost whatever they take counts as rows, too.
    """
    points = 1 + (tuning.order > 0)
    if tuning.rows is None:
        return tuning.rate / points
    of_step = work_of_step(tuning.noise.size, points * tuning.rows * tuning.rows_of_each)
    n = inner_steps(tuning)
    # a multiplier makes up for a rate that the Gaussian fit promises and draws don't have
    n_as_promised = n / tuning.n_steps_multiplier
    relaxation = min(RELAXED, -n_as_promised * math.log1p(-min(tuning.rate, ALL)))
    return relaxation / (ROWS_OF_DRAW + n * of_step)


def work_of_step(d: int, rows: float) -> float:
    """Return the work of an inner step, in rows: all else that it does counts as some."""
    multiplications = d * min(d, DIRECTIONS) if d > MANY else d**2
    return ROWS_OF_STEP + multiplications / SQUARED_PER_ROW + rows


def inner_steps(tuning: Tuning) -> int:
    """Inner steps in a draw: with second-order control variates as many as decorrelate draws.

    A handful of rows costs less than what PyMC does for a draw; steps of first order are as many as
    ever, so that a draw costs little beside them. More where tuning draws were too much alike.
    """
    if isinstance(tuning, ByHand):
        return MOST_INNER_STEPS
    n = MOST_INNER_STEPS
    if tuning.order == 2 and 0 < tuning.rate < 1:
        n = math.ceil(RELAXED / -math.log1p(-tuning.rate) - 1e-6)
    return math.ceil(min(max(n, FEWEST_INNER_STEPS), MOST_INNER_STEPS) * tuning.n_steps_multiplier)
