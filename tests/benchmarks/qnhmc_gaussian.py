"""Table 1 of the QNHMC paper, a Gaussian of 100 unknowns, and what its columns leave out.

    python tests/benchmarks/qnhmc_gaussian.py [--draws 100000] [--tuned-draws 10000] [--seed 1]
        [--markdown]

Fu, Luo & Zhang (2016), section 5.1: N(0, Σ), Σ = 11ᵀ + 4I, step size .01, 10 leapfrog steps, 100,000
draws from a point far from the mode, the same for all, of which the second half is used. HMC is
`qnhmc.update` with C = M = I; QNHMC as printed adapts for ever and has M = I, its acceptance
probability with the right sign; QNHMC as shipped has M = C, and tunes during the first half. They
are loops over the package's functions with a density in NumPy.

The second table is of the samplers with settings of their own, from a draw of the target: the step
size of sixteen that gives the most min-ESS, of draws and of their squares, in short runs with 10
steps; and, on a PyMC model of the same Gaussian, defaults of QNHMC, PyMC's HMC and NUTS, and nutpie,
in one chain with 1,000 draws of tuning.

The paper's columns look along 1 only: Σ|ρ| is the sum of the autocorrelations' absolute values to lag
500, its ESS n/(1 + 2 Σρ) with 500 lags, and burn-in the time until the negative log density is first
in the interval that holds 99.9 % of the target's. The others: the least bulk ESS of ArviZ over Σ's
eigenvectors and the coordinates (HMC-BFGS moves five states in turn, each a chain of its own to ArviZ,
which misjudges them in one), and that of their squares, without which a chain that swings from
side to side looks better than independent draws; errors of the 100 marginal variances, relative to
5, the largest and the root of the mean square; the variance along 1 by its true value. Seconds are
those of the draws used, without tuning; those of loops in NumPy and of PyMC's steps don't compare in
detail. Gradients are leapfrog steps.

Prints one line of JSON and with ``--markdown`` two tables.
"""

import os

# One processor: BLAS threads would fight with other work on the machine.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import logging
import sys
import time
import warnings

from pathlib import Path
from typing import NamedTuple

import numpy as np

from scipy.linalg import helmert
from scipy.stats import chi2

sys.path.append(str(Path(__file__).parents[2] / "examples/papers"))  # HMC-BFGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import arviz as az
    import hmc_bfgs
    import pymc as pm
    import report

    from posteriordb_table import PACKAGES, SAMPLERS, Run, attempt
    from untouched import over_unknowns

    from pymc_sghmc.exact import curvature, qnhmc
    from pymc_sghmc.exact.quasi_newton import identity

D = 100
COVARIANCE = np.ones((D, D)) + 4 * np.eye(D)
PRECISION = np.linalg.inv(COVARIANCE)
ONES = np.ones(D) / D**0.5
DIRECTIONS = np.vstack([ONES, helmert(D), np.eye(D)])  # eigenvectors of Σ and coordinates
START_SCALE = 20.0  # of the start's coordinates; the posterior's sds are 2.2
STEP_SIZE, N_STEPS = 0.01, 10  # the paper's
N_STATES = 5
LAGS = 500
TUNE = 1000  # of PyMC's steps
BAND = chi2.ppf([0.0005, 0.9995], D)  # holds 99.9 % of the target's xᵀΣ⁻¹x
LEAST_ACCEPT = 0.4  # a chain that stands still has the effective size of constants, which is n
SHORT = 2000  # draws of the runs that choose a step size, the first half unused


class Chain(NamedTuple):
    draws: np.ndarray  # the used ones, (n, d)
    gradients: int  # for them
    seconds: float  # for them
    burn_in: tuple | None = None  # draws and seconds; None is never
    accept: float | None = None
    n_states: int = 1  # that are moved in turn
    distances: np.ndarray | None = None  # xᵀΣ⁻¹x of all draws, the unused ones as well


def density(x):
    gradient = -PRECISION @ x
    return x @ gradient / 2, gradient


def hmc(start, rng, *, step_size, n_steps, **_):
    """HMC: (position, information) of each draw."""
    state, eye = qnhmc.init(start, density), identity(D, dense=False)
    while True:
        state, info, _ = qnhmc.update(
            state, density, step_size, rng, inverse_hessian=eye, mass=eye, n_steps=n_steps
        )
        yield state.position, info


def ensemble(start, rng, *, step_size, n_steps, **_):
    """HMC-BFGS."""
    state = hmc_bfgs.init(start, density, N_STATES)
    while True:
        state, info = hmc_bfgs.update(state, density, step_size, rng, n_steps=n_steps)
        yield state.position, info


def printed(start, rng, **settings):
    """QNHMC with M = I and without an end of adaptation."""
    eye = identity(D, dense=False)
    return _qnhmc(start, rng, mass=eye, for_ever=True, **settings)


def shipped(start, rng, **settings):
    """QNHMC with M = C, learnt in the first ``tune`` draws."""
    return _qnhmc(start, rng, mass=None, for_ever=False, **settings)


def _qnhmc(start, rng, *, mass, for_ever, step_size, n_steps, tune):
    state, c = qnhmc.init(start, density), curvature.begin(D, None, for_ever)
    draw = 0
    while True:
        adapting = for_ever or draw < tune
        path = [(state.position, state.gradient)] if adapting and not c.window else None
        C = c.inverse_hessian
        state, info, _ = qnhmc.update(
            state,
            density,
            step_size,
            rng,
            inverse_hessian=C,
            mass=C if mass is None else mass,
            n_steps=n_steps,
            path=path,
        )
        if path is not None:
            c = curvature.follow(c, path, info["accepted"])
        elif adapting:
            c = curvature.gather(c, state.position, state.gradient, lambda x: density(x)[1])
        draw += 1
        yield state.position, info


LOOPS = {
    "HMC": hmc,
    f"HMC-BFGS, {N_STATES} states": ensemble,
    "QNHMC as printed (M = I, adapts for ever)": printed,
    "QNHMC as shipped (M = C, then frozen)": shipped,
}
GRIDS = {  # step sizes up to the stability limit: that of the dynamics with the true C
    hmc: np.linspace(0.2, 3.2, 16),
    ensemble: np.linspace(0.2, 3.2, 16),
    printed: np.linspace(0.01, 0.16, 16),
    shipped: np.linspace(0.1, 1.6, 16),
}


def run(sampler, start, draws, seed, *, track=iter, **settings):
    """One chain, of which the second half is used; ``track`` shows progress."""
    chain = sampler(start, np.random.default_rng(seed), tune=draws // 2, **settings)
    positions, distances, steps, accept = np.empty((draws, D)), np.empty(draws), 0, 0.0
    (low, high), burn_in, half = BAND, None, draws // 2
    begin = used = time.perf_counter()
    for i in track(range(draws)):
        if i == half:
            used = time.perf_counter()
        positions[i], info = next(chain)
        if i >= half:
            steps += info["n_steps"]
            accept += info["accept"]
        distances[i] = -2 * info["model_logp"]
        if burn_in is None and low <= distances[i] <= high:
            burn_in = i + 1, time.perf_counter() - begin
    seconds = time.perf_counter() - used
    n_states = N_STATES if sampler is ensemble else 1
    accept /= draws - half
    return Chain(positions[half:], steps, seconds, burn_in, accept, n_states, distances)


def autocorrelations(x, lags):
    """Those of lags 1 to ``lags``."""
    n = len(x)
    spectrum = np.abs(np.fft.rfft(x - x.mean(), 2 * n)) ** 2
    covariances = np.fft.irfft(spectrum)[: lags + 1] / n
    return covariances[1:] / covariances[0]


def least_ess(chain):
    """Of the directions and of their squares; states in turn are chains of their own."""
    K = chain.n_states
    projections = (chain.draws @ DIRECTIONS.T)[: len(chain.draws) // K * K]
    projections = projections.reshape(-1, K, len(DIRECTIONS)).swapaxes(0, 1)
    return [over_unknowns(az.ess, x).min() for x in (projections, projections**2)]


def measure(chain):
    x = chain.draws @ ONES
    rho = autocorrelations(x, min(LAGS, len(x) // 2))
    time = 1 + 2 * rho.sum()
    paper_ess = len(x) / time if time > 0 else np.nan
    variances = (chain.draws**2).mean(axis=0) / np.diag(COVARIANCE)  # the mean is known: 0
    ess, squares_ess = least_ess(chain)
    return {
        "draws": len(x),
        "sum_rho": np.abs(rho).sum(),
        "paper_ess": paper_ess,
        "paper_ess_per_second": paper_ess / chain.seconds,
        "burn_in": chain.burn_in,
        "min_ess": ess,
        "min_ess_of_squares": squares_ess,
        "min_ess_per_1000_gradients": 1000 * ess / chain.gradients,
        "min_ess_of_squares_per_1000_gradients": 1000 * squares_ess / chain.gradients,
        "min_ess_per_second": ess / chain.seconds,
        "variance_error": np.abs(variances - 1).max(),
        "rms_variance_error": ((variances - 1) ** 2).mean() ** 0.5,
        "variance_along_1": (x**2).mean() / (ONES @ COVARIANCE @ ONES),
        "accept": chain.accept,
        "gradients": chain.gradients,
        "seconds": chain.seconds,
    }


def best_step_size(sampler, start, seed):
    """The step size with the most min-ESS of draws and their squares, all having as many gradients.

    With the draws alone it would be one near a period's half, after which every draw is minus the last
    one: effective numbers above the draws' and variances that never get right.
    """
    found = {}
    for step_size in map(float, GRIDS[sampler]):
        chain = run(sampler, start, SHORT, seed, step_size=step_size, n_steps=N_STEPS)
        found[step_size] = min(least_ess(chain)) if chain.accept >= LEAST_ACCEPT else 0.0
    return max(found, key=found.get)


def gaussian(start):
    with pm.Model() as model:
        x = pm.Flat("x", shape=D, initval=start)
        pm.Potential("target", -x @ pm.math.dot(PRECISION, x) / 2)
    return model


def by_pymc(sampler, model, draws, seed):
    sampled = attempt(sampler, model, draws=draws, tune=TUNE, chains=1, seed=seed)
    if not isinstance(sampled, Run):
        return sampled
    draws = sampled.idata["posterior"]["x"].values[0]
    statistics = sampled.idata["sample_stats"]
    [accept] = {"accept", "acceptance_rate", "mean_tree_accept"} & set(statistics.data_vars)
    accept = float(statistics[accept].mean())
    chain = Chain(draws, sampled.gradients, sampled.seconds, accept=accept)
    return measure(chain) | {"tuning_gradients": sampled.tuning_gradients}


def markdown(result):
    titles = ["step size .01, 10 steps", "Σ\\|ρ\\| along 1", "ESS along 1, 500 lags", "per second"]
    titles += ["burn-in, s", "draws"]
    truth = ["min bulk ESS, all directions", "per 1,000 gradients", "per second"]
    truth[2:2] = ["of squares, per 1,000 gradients"]
    truth += ["largest error of a variance, %", "rms, %", "variance along 1 / truth", "accepted"]
    paper = [title(name, row, paper_cells(row)) for name, row in result["paper_setting"].items()]
    tuned = []
    for name, row in result["tuned"].items():
        cells = [] if "failed" in row else [row["sum_rho"], row["paper_ess"], *true_cells(row)]
        tuned.append(title(name, row, cells, len(truth) + 3))
    return "\n\n".join(
        [
            report.markdown_table(titles + truth, paper),
            report.markdown_table(["settings of their own", *titles[1:3], *truth], tuned),
            f"The first table: {result['draws']:,} draws, the second half used. The second: "
            f"{result['tuned_draws']:,} used, from a draw of the target. One chain, seed "
            f"{result['seed']}, the first table's started where −log p is "
            f"{result['start_negative_log_density']:,.0f} above the mode's. {report.note(result)}",
        ]
    )


def paper_cells(row):
    draws, seconds = row["burn_in"] or ("never", None)
    paper = row["sum_rho"], row["paper_ess"], row["paper_ess_per_second"], seconds, draws
    return [*paper, *true_cells(row)]


def true_cells(row):
    errors = 100 * row["variance_error"], 100 * row["rms_variance_error"]
    keys = "min_ess", "min_ess_per_1000_gradients", "min_ess_of_squares_per_1000_gradients"
    ess = [row[key] for key in (*keys, "min_ess_per_second")]
    return [*ess, *errors, row["variance_along_1"], row["accept"]]


def title(name, row, cells, width=0):
    if "failed" in row:
        return [name, f"failed: {row['failed']}", *[""] * (width - 2)]
    if "step_size" in row:
        name = f"{name}, step size {row['step_size']:.2f}, {N_STEPS} steps"
    return [name, *cells]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--tuned-draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print tables as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the table says what the samplers' warnings would
    logging.getLogger("pymc").setLevel(logging.CRITICAL)
    machine = report.machine()
    rng = np.random.default_rng([args.seed, 0])
    start = START_SCALE * rng.standard_normal(D)
    inside = np.linalg.cholesky(COVARIANCE) @ rng.standard_normal(D)
    settings, paper, tuned = {"step_size": STEP_SIZE, "n_steps": N_STEPS}, {}, {}
    for name, sampler in LOOPS.items():
        paper[name] = measure(run(sampler, start, args.draws, args.seed, **settings))
        report.progress(name, paper[name])
    for name, sampler in LOOPS.items():
        own = {"step_size": best_step_size(sampler, inside, args.seed), "n_steps": N_STEPS}
        tuned[name] = measure(run(sampler, inside, 2 * args.tuned_draws, args.seed, **own)) | own
        report.progress(name, tuned[name])
    for name, sampler in SAMPLERS.items():
        name = f"{name}, defaults"
        tuned[name] = by_pymc(sampler, gaussian(inside), args.tuned_draws, args.seed)
        report.progress(name, tuned[name])
    result = {
        "benchmark": "qnhmc_gaussian",
        "unknowns": D,
        "draws": args.draws,
        "tuned_draws": args.tuned_draws,
        "seed": args.seed,
        "start_negative_log_density": -density(start)[0],
        "paper_setting": paper,
        "tuned": tuned,
        **report.closing(machine, *PACKAGES),
    }
    report.print_json(result)
    if args.markdown:
        print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
