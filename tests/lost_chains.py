"""Chains of a step that is built once, and whether one of them is lost without a word.

A chain is *lost* where a mean is further than half an sd and five of its own Monte Carlo errors from
the posterior's, an sd outside of .7 to 1.4 times it, or anything isn't finite; it has *told* where a
draw of its came with a warning, something was logged, or it ended in an error. Lost and nothing
told: *silently* lost.
"""

import warnings

from contextlib import contextmanager
from typing import NamedTuple

import arviz as az
import numpy as np
import xarray as xr

from logs import logged_warnings
from pymc.exceptions import SamplingError

from pymc_sghmc.compat import inference_data

__all__ = ["Ended", "as_inference_data", "logged", "lost", "run_chain", "trace", "worst"]

SHIFT, ERRORS, SDS = 0.5, 5, (0.7, 1.4)
TUNE, TUNE_STEPS = 300, 10  # draws, and inner steps in each


class Ended(NamedTuple):
    """What became of a chain."""

    seed: int
    draws: np.ndarray  # on the unconstrained scale
    temperatures: np.ndarray  # configurational, of each draw
    told_while_tuning: list  # texts
    told: list  # after it
    failed: bool  # with an error
    order: int  # of the gradient at its end
    rows: int | None
    learning_rate: float
    weights: np.ndarray  # of the draws
    radius: float = np.nan  # farthest from the step's centre, over √d


@contextmanager
def logged():
    """Collect what is logged as a warning or worse; Python's own warnings aren't shown."""
    with warnings.catch_warnings(), logged_warnings() as texts:
        warnings.simplefilter("ignore")
        yield texts


def run_chain(step, start, seed, n_inner, n_steps=50) -> Ended:
    """Tune, and make ``n_inner`` inner steps, ``n_steps`` of them a draw, as PyMC would.

    Parameters
    ----------
    step : StochasticGradientStep
        Its set-up is shared by all chains.
    start : dict
        A point of PyMC.
    """
    step.begin_chain(np.random.default_rng(seed))
    point, texts, draws, rows, failed = start, ([], []), [], [], False
    with logged() as log:
        try:
            for tuned, n_draws, n in ((0, TUNE, TUNE_STEPS), (1, n_inner // n_steps, n_steps)):
                if tuned:
                    step.stop_tuning()
                step.draws.n_steps = n
                for _ in range(n_draws):
                    point, [row] = step.step(point)
                    if row["warning"] is not None:
                        texts[tuned].append(row["warning"].message)
                    if tuned:
                        draws.append(step.unknowns.ravel(point).astype(float))
                        rows.append(row)
        except SamplingError as error:
            failed, texts[1][len(texts[1]) :] = True, [str(error)]
        finally:
            step.draws.n_steps = TUNE_STEPS
    failed = failed or step.chain.fault is not None
    tuning = step.chain.tuning
    return Ended(
        seed,
        np.array(draws),
        np.array([row["configurational_temperature"] for row in rows]),
        texts[0],
        texts[1] + log,
        failed,
        tuning.order if tuning else 0,
        tuning.rows if tuning else None,
        tuning.learning_rate if tuning else np.nan,
        np.array([row["draw_weight"] for row in rows]),
        max((step.tuner.setups.radius(x) for x in draws), default=np.nan) / step.unknowns.d**0.5,
    )


def worst(ended, posterior) -> dict:
    """Errors of a chain's means and sds in each unknown, and their Monte Carlo errors."""
    x = ended.draws
    if len(x) < 10 or not np.abs(x).max() < 1e100:  # or NaN
        return {}
    squares = np.square(x - x.mean(axis=0))
    sd = np.sqrt(squares.mean(axis=0))
    own = np.array([_error(column) for column in x.T])
    own_sd = np.array([_error(column) for column in squares.T]) / (2 * squares.mean(axis=0))
    return {
        "mean": (x.mean(axis=0) - posterior.mean) / posterior.sd,
        "mean_mc": np.hypot(own, posterior.error) / posterior.sd,
        "sd": sd / posterior.sd,
        "sd_mc": np.hypot(own_sd, posterior.sd_error) * sd / posterior.sd,
    }


def lost(errors) -> bool:
    """Whether a chain with these errors is lost."""
    if not errors or not all(np.isfinite(part).all() for part in errors.values()):
        return True
    is_off = np.abs(errors["mean"]) > SHIFT + ERRORS * errors["mean_mc"]
    is_wide = (errors["sd"] < SDS[0]) | (errors["sd"] > SDS[1])
    return bool((is_off | is_wide).any())


def trace(draws, posterior) -> float:
    """tr(P⁻¹Σ)/d of the posterior's covariance P, Σ about the right mean."""
    shift = draws - posterior.mean
    return float(np.mean(shift * np.linalg.solve(posterior.covariance, shift.T).T))


def as_inference_data(model, chains):
    """Chains together as ``pm.sample`` returns them, for the diagnostics of finished runs."""
    draws, dims, at, variables = (
        np.array([chain.draws for chain in chains]),
        ["chain", "draw"],
        0,
        {},
    )
    for value in model.continuous_value_vars:
        rv, shape = model.values_to_rvs[value], model.initial_point()[value.name].shape
        size = int(np.prod(shape))
        x = draws[..., at : at + size].reshape(*draws.shape[:2], *shape)
        x = x if model.rvs_to_transforms[rv] is None else np.exp(x)  # there are no others here
        variables[rv.name] = ([*dims, *[f"{rv.name}_{i}" for i in range(len(shape))]], x)
        at += size
    statistics = {
        "configurational_temperature": np.array([chain.temperatures for chain in chains]),
        "target_temperature": np.ones(draws.shape[:2]),
        "draw_weight": np.array([chain.weights for chain in chains]),
    }
    coords = {"chain": range(draws.shape[0]), "draw": range(draws.shape[1])}
    statistics = {name: (dims, x) for name, x in statistics.items()}
    return inference_data(
        {"posterior": xr.Dataset(variables, coords), "sample_stats": xr.Dataset(statistics, coords)}
    )


def _error(x):
    if x.std() == 0:
        return np.inf
    return float(np.squeeze(az.mcse(np.ascontiguousarray(x)[None])))
