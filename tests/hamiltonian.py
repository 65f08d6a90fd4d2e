"""What tests of samplers with full gradients share: densities with exact moments, and chains of a step."""

import math

import numpy as np
import pymc as pm

from modes import QUIET

TIMES = {"process_time_diff", "perf_counter_diff", "perf_counter_start"}


def gaussian(H):
    return lambda q: (-q @ H @ q / 2, -H @ q)


# log-densities of one unknown with their gradients, and their exact second moments
DENSITIES = {
    "gaussian": (lambda x: (-x @ x / 2, -x), 1.0),
    "quartic": (lambda x: (-((x @ x) ** 2) / 4, -(x**3)), 0.675978240067),
    "sech": (lambda x: (-np.logaddexp(x, -x).item(), -np.tanh(x)), math.pi**2 / 4),
    "t5": (lambda x: (-3 * math.log1p(x @ x / 5), -6 * x / (5 + x * x)), 5 / 3),
}


LIMIT = 5  # standard errors: of 200 scores one seed in 8,000 passes it, of two of t5 one in 3,000


def spd(d, kappa, rng):
    root = np.linalg.qr(rng.standard_normal((d, d)))[0] * np.geomspace(1, kappa**0.5, d)
    return root @ root.T


def full(matrix, d):
    return np.column_stack([matrix.product(e) for e in np.eye(d)])


def double_well(q):
    """log p of three unknowns, of another curvature at each point."""
    A = np.array([[1.0, 0.4, 0.0], [0.4, 1.0, -0.3], [0.0, -0.3, 0.2]])
    return -q @ A @ q / 2 - ((q**2 - 1) ** 2).sum() / 4, -A @ q - q * (q**2 - 1)


def begin(step, seed=1):
    step.begin_chain(np.random.default_rng(seed))
    return step


def run(step, point, n):
    """Positions, statistics and the last point of ``n`` draws."""
    positions, stats = [], []
    for _ in range(n):
        point, [stat] = step.step(point)
        positions.append(np.concatenate([np.ravel(point[name]) for name in step.var_names]))
        stats.append(stat)
    return np.array(positions), stats, point


def sample(draws=1000, tune=400, **settings):
    settings = {"chains": 2, "cores": 1, "random_seed": 8, **QUIET, **settings}
    return pm.sample(draws, tune=tune, **settings)


def same(first, second):
    for name in first.posterior:
        np.testing.assert_array_equal(first.posterior[name], second.posterior[name])
    for name in set(first.sample_stats) - TIMES:
        np.testing.assert_array_equal(first.sample_stats[name], second.sample_stats[name])
