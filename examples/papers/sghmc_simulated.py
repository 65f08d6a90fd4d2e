"""Figures 1 to 3 of Chen, Fox & Guestrin (2014), section 4.1: SGHMC on three simulated targets.

Run ``python examples/papers/sghmc_simulated.py [folder] [--quick]``. It writes sghmc_simulated.md
and sghmc_simulated.png, and fails if SGHMC is not close to its target, if stochastic gradient HMC
without friction is, or if an estimate is off its exact value by more than Monte Carlo error.
"""

import sys

import common
import matplotlib.pyplot as plt
import numpy as np
import pymc as pm

from report import markdown_table
from rich.progress import track
from scipy.integrate import quad
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import brentq
from scipy.stats import norm

from pymc_sghmc import SGHMC
from pymc_sghmc.samplers import sghmc, sgld

# Figures 1 and 2, with M = 1: step size, friction, variance of the gradient, steps per momentum.
EPSILON, C, V, REDRAW = 0.1, 3.0, 4.0, 50
SETTINGS = {
    "learning_rate": EPSILON**2,  # η = ε²
    "friction": EPSILON * C,  # α = εC
    "noise_estimate": 0.5 * EPSILON**2 * V,  # β̂ = ½ηV
}
NAIVE_MH, NAIVE = "naive stochastic gradient HMC, MH", "naive stochastic gradient HMC, no MH"
EDGES = np.linspace(-2.5, 2.5, 61)

# Figure 3: the settings of the authors' script.
SIGMA = np.array([[1.0, 0.9], [0.9, 1.0]])
H = np.linalg.inv(SIGMA)
SGLD_ETA = 0.18 * 0.8 ** np.arange(5)
SGHMC_ETA, SGHMC_ALPHA = 0.05 * 0.36 ** np.arange(5), 0.05 * 0.6 ** np.arange(5)
N_CHAINS, BURN_IN = 2000, 1000


class NoisyGradient:
    """Gradient of the log-density −U of many chains at once, with noise N(0, V)."""

    def __init__(self, slope, variance, shape):
        self.slope, self.sd, self.shape = slope, variance**0.5, shape

    def draw_minibatch(self, rng):
        """Return the noise, which stands for the rows of a minibatch."""
        return self.sd * rng.standard_normal(self.shape)

    def __call__(self, position, minibatch):
        """Return log-density, which nobody needs here, and gradient."""
        return np.nan, minibatch - self.slope(position)

    def draw(self, position, rng):
        """Return the gradient with fresh noise."""
        return self(position, self.draw_minibatch(rng))[1]


def double_well(theta):
    return theta**2 * (theta**2 - 2)


def double_well_slope(theta):
    return 4 * theta * (theta**2 - 1)


def leapfrog(theta, r, force, gradient, rng):
    r = r + 0.5 * EPSILON * force
    theta = theta + EPSILON * r
    force = gradient.draw(theta, rng)
    return theta, r + 0.5 * EPSILON * force, force


def hmc(variance, metropolis, n_draws, n_chains, rng):
    """Return draws by Algorithm 1, of shape (chain, draw), and the share of accepted ones."""
    gradient = NoisyGradient(double_well_slope, variance, n_chains)
    theta, draws, accepted = np.zeros(n_chains), [], []
    for _ in range(n_draws):
        r = rng.standard_normal(n_chains)
        new, new_r, force = theta, r, gradient.draw(theta, rng)
        for _ in range(REDRAW):
            new, new_r, force = leapfrog(new, new_r, force, gradient, rng)
        change = double_well(new) + 0.5 * new_r**2 - double_well(theta) - 0.5 * r**2
        accept = np.log(rng.random(n_chains)) < -change if metropolis else np.isfinite(new)
        theta = np.where(accept, new, theta)
        draws.append(theta)
        accepted.append(accept.mean())
    return np.transpose(draws), np.mean(accepted)


def double_well_model(batch_size, n_rows=1000):
    """Return a model whose rows cancel, but whose minibatches have a gradient of variance V."""
    x = norm.ppf((np.arange(n_rows) + 0.5) / n_rows)
    # Rows are drawn with replacement: the gradient's variance is N²/n times that of a row.
    x = (x - x.mean()) / x.std() * (V * batch_size) ** 0.5 / n_rows
    with pm.Model() as model:
        theta = pm.Flat("theta")
        pm.Potential("double_well", -double_well(theta))
        pm.CustomDist("y", theta, logp=lambda value, theta: value * theta, observed=x)
    return model


def sample_sghmc(n_draws, seed):
    """Return draws by `pm.sample`, and mean and variance of the noise of the step's gradient."""
    with double_well_model(batch_size=10):
        step = SGHMC(
            batch_size=10,
            gradient="plain",
            preconditioner=None,
            integrator="euler",
            n_steps=10,
            resample_momentum_every=REDRAW,
            **SETTINGS,
        )
        idata = pm.sample(
            n_draws,
            tune=100,
            chains=4,
            cores=1,
            step=step,
            random_seed=seed,
            progressbar=sys.stderr.isatty(),
            compute_convergence_checks=False,
        )
    rng, at = np.random.default_rng(seed), np.array([0.5])
    gradient = step.tuner.gradient
    drawn = [gradient(at, gradient.order.probe(rng))[1][0] for _ in range(20_000)]
    noise = np.array(drawn) + double_well_slope(at)
    return idata.posterior["theta"].values, (noise.mean(), noise.var())


def masses():
    """Return the probability of each bin, and of both tails, under the target."""
    edges = np.array([-np.inf, *EDGES, np.inf])
    parts = [
        quad(lambda x: np.exp(-double_well(x)), *edges[i : i + 2])[0] for i in range(len(EDGES) + 1)
    ]
    return np.array(parts) / sum(parts)


def shares(draws):
    """Return the shares of the bins, (run, block, bin), in draws of shape (run, block, draw)."""
    bins = len(EDGES) + 1
    codes = np.digitize(draws, EDGES).reshape(-1, draws.shape[-1])
    counts = [np.bincount(row, minlength=bins) for row in codes]
    return np.reshape(counts, (*draws.shape[:2], bins)) / draws.shape[-1]


def distances(histograms):
    """Return the total variation from the target: mean and sd over runs, and of all runs together.

    The last number is what the third would be by chance if the law were the target's.
    """
    target = masses()
    runs = 0.5 * np.abs(histograms.mean(1) - target).sum(-1)
    blocks = histograms.reshape(-1, len(target))
    errors = blocks.std(0, ddof=1) / len(blocks) ** 0.5
    together = 0.5 * np.abs(blocks.mean(0) - target).sum()
    return runs.mean(), runs.std(ddof=1), together, 0.5 * (2 / np.pi) ** 0.5 * errors.sum()


def figure_1(axes, quick, seed):
    """Draw the histograms; return the lines of the table and what is measured of the noise."""
    n_runs, n_draws = (4, 40) if quick else (20, 400)  # 50 chains make a run
    variants = {"HMC, MH": (0.0, True), "HMC, no MH": (0.0, False)}
    variants |= {NAIVE_MH: (V, True), NAIVE: (V, False)}
    found, rows = {}, {}
    for name, variant in track(variants.items(), "HMC"):
        rng = np.random.default_rng(seed)
        draws, accepted = hmc(*variant, 20 + n_draws, 50 * n_runs, rng)
        found[name] = shares(draws[:, 20:].reshape(n_runs, 50, -1))
        rows[name] = [50 * n_draws * REDRAW, n_runs, accepted if variant[1] else None]
    draws, noise = sample_sghmc(6000 if quick else 100_000, seed)
    found["SGHMC"] = shares(draws.reshape(4, 20, -1))
    rows["SGHMC"] = [10 * draws.shape[1], 4, None]

    centres, width = (EDGES[1:] + EDGES[:-1]) / 2, EDGES[1] - EDGES[0]
    axes.fill_between(centres, masses()[1:-1] / width, color="0.85", label="target")
    for name, style in zip(found, ("-", "--", "-", "-", "--"), strict=True):
        axes.plot(centres, found[name].mean((0, 1))[1:-1] / width, style, label=name)
    axes.set(title="Figure 1: U(θ) = −2θ² + θ⁴", xlabel="θ", ylabel="density", ylim=(0, 0.8))
    axes.legend(loc="upper right", fontsize=8)
    return {name: [*rows[name], *distances(found[name])] for name in found}, noise


def hamiltonian_path(variance, redraw, n_steps, n_paths, rng):
    gradient = NoisyGradient(lambda theta: theta, variance, n_paths)
    theta, r, path = np.ones(n_paths), np.zeros(n_paths), []
    force = gradient.draw(theta, rng)
    for t in range(n_steps):
        if redraw and t % REDRAW == 0:
            r = rng.standard_normal(n_paths)
        theta, r, force = leapfrog(theta, r, force, gradient, rng)
        path.append((theta, r))
    return np.array(path)


def sghmc_path(n_steps, n_paths, rng):
    gradient = NoisyGradient(lambda theta: theta, V, n_paths)
    state, path = sghmc.SGHMCState(np.ones(n_paths), np.zeros(n_paths)), []
    for _ in range(n_steps):
        state, _ = sghmc.update(state, gradient, rng=rng, **SETTINGS)
        path.append((state.position, state.momentum / EPSILON))  # v = εr
    return np.array(path)


def figure_2(axes, seed, n_steps=15_000, n_paths=100):
    """Draw every 50th point of a path of each dynamics; return the lines of the table."""
    rng = np.random.default_rng(seed)
    paths = {
        "noisy": hamiltonian_path(V, False, n_steps, n_paths, rng),
        "r redrawn every 50 steps": hamiltonian_path(V, True, n_steps, n_paths, rng),
        "with friction (SGHMC)": sghmc_path(n_steps, n_paths, rng),
        "noise-free": hamiltonian_path(0.0, False, n_steps, n_paths, rng),
    }
    rows = {}
    centre = axes.inset_axes((0.66, 0.02, 0.33, 0.33), xlim=(-5, 5), ylim=(-5, 5))
    centre.set(xticks=[], yticks=[])
    for (name, path), marker in zip(paths.items(), "v^ox", strict=True):
        for place in (axes, centre):
            place.scatter(*path[REDRAW - 1 :: REDRAW, :, 0].T, 8, marker=marker, label=name)
        squares = np.mean(path[-5000:, 0] ** 2, axis=0)
        error = squares.std(ddof=1) / n_paths**0.5 if name != "noise-free" else None
        rows[name] = [np.abs(path[:, 0, 0]).max(), squares.mean(), error]
    axes.indicate_inset_zoom(centre)
    axes.set(title="Figure 2: U(θ) = ½θ², 15,000 steps", xlabel="θ", ylabel="momentum r")
    axes.set(xlim=(-40, 40), ylim=(-40, 40))
    axes.legend(loc="upper right", fontsize=8)
    return rows


def sampler(eta, alpha=None):
    """Return SGHMC, or without α SGLD, with settings that make room for gradient noise V = I."""
    if alpha is None:  # noise N(0, 2ηT), T = 1 − ½ηV
        return sgld, {"learning_rate": eta, "temperature": 1 - 0.5 * eta}
    return sghmc, {"learning_rate": eta, "friction": alpha, "noise_estimate": 0.5 * eta}


def law(eta, alpha=None):
    """Return A and the stationary covariance of x ← Ax + N(0, Q), x being θ or (θ, v)."""
    one, zero = np.eye(2), np.zeros((2, 2))
    if alpha is None:
        A, Q = one - eta * H, 2 * eta * one
    else:
        A = np.block([[one, one], [-eta * H, (1 - alpha) * one - eta * H]])
        Q = np.block([[zero, zero], [zero, 2 * alpha * eta * one]])
    return A, solve_discrete_lyapunov(A, Q)


def covariance_error(eta, alpha=None):
    """Return the mean absolute error of the stationary covariance."""
    return np.abs(law(eta, alpha)[1][:2, :2] - SIGMA).mean()


def autocorrelation_times(eta, alpha=None, n_lags=200_000):
    """Return 1 + Σρ of θ and of θ² under the stationary law, means of both coordinates."""
    A, S = law(eta, alpha)
    values, vectors = np.linalg.eig(A)
    weights = vectors[:2] * np.linalg.solve(vectors, S[:, :2]).T
    rho = (values ** np.arange(n_lags)[:, None] @ weights.T).real / np.diag(S)[:2]
    return rho.sum(0).mean(), (rho**2).sum(0).mean()


def equal_sgld(eta, alpha):
    """Return SGLD's η that has the covariance error of SGHMC's."""
    error = covariance_error(eta, alpha)
    return brentq(lambda x: covariance_error(x) - error, 1e-5, SGLD_ETA[0])


def estimate(eta, alpha, n_steps, rng):
    """Return autocorrelation time, covariance error and its Monte Carlo error."""
    module, settings = sampler(eta, alpha)
    start = rng.multivariate_normal(np.zeros(2), SIGMA, N_CHAINS)
    gradient = NoisyGradient(lambda theta: theta @ H, 1.0, start.shape)
    state, sums, products = module.init(start, eta, rng), 0.0, 0.0
    for t in range(BURN_IN + n_steps):
        state, _ = module.update(state, gradient, rng=rng, **settings)
        if t >= BURN_IN:
            theta = state.position
            sums = sums + theta
            products = products + theta[:, [0, 0, 1, 1]] * theta[:, [0, 1, 0, 1]]
    means, products = sums / n_steps, products / n_steps
    grand, errors = means.mean(0), products.std(0, ddof=1) / N_CHAINS**0.5
    covariance = products.mean(0).reshape(2, 2) - np.outer(grand, grand)
    # n Var(mean)/Var is 1 + 2 Σρ over all lags, whatever the sign of ρ.
    tau = (1 + n_steps * means.var(0, ddof=1) / np.diag(covariance)).mean() / 2
    return tau, np.abs(covariance - SIGMA).mean(), errors.mean()


def figure_3(axes, n_steps, seed):
    """Draw error against autocorrelation time; return the lines of both tables."""
    rng = np.random.default_rng(seed)
    pairs = list(zip(SGHMC_ETA, SGHMC_ALPHA, strict=True))
    settings = [(eta, None) for eta in (*SGLD_ETA, equal_sgld(*pairs[0]))] + pairs
    rows, equal = [], []
    for eta, alpha in track(settings, "SGLD, SGHMC"):
        tau, error, by_chance = estimate(eta, alpha, n_steps, rng)
        exact = autocorrelation_times(eta, alpha)[0], covariance_error(eta, alpha)
        name = "SGLD" if alpha is None else "SGHMC"
        rows.append([name, eta, alpha, tau, exact[0], error, by_chance, exact[1]])
    for name, colour in (("SGLD", "C0"), ("SGHMC", "C3")):
        values = np.array([row[3:] for row in rows if row[0] == name]).T
        tau, exact_tau, error, by_chance, exact = values
        axes.plot(exact_tau, exact, color=colour, alpha=0.5, label=f"{name}, stationary law")
        axes.errorbar(tau, error, by_chance, fmt="o", color=colour, label=f"{name}, samples")
    for eta, alpha in pairs:
        times = [autocorrelation_times(eta, alpha), autocorrelation_times(equal_sgld(eta, alpha))]
        times = [x for pair in zip(*times, strict=True) for x in (*pair, pair[0] / pair[1])]
        equal.append([f"{covariance_error(eta, alpha):.2g}", eta, equal_sgld(eta, alpha), *times])
    axes.set(title="Figure 3, left: ρ = 0.9", xscale="log", yscale="log", ylim=(5e-5, 1))
    axes.set(xlabel="autocorrelation time 1 + Σρ", ylabel="mean absolute error of the covariance")
    axes.set_xticks(ticks := [2, 5, 10, 20, 50], [str(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter("")
    axes.legend(fontsize=8)
    return rows, equal


def first_samples(axes, seed):
    """Figure 3, right, at the settings of the authors' script."""
    rng = np.random.default_rng(seed)
    gradient = NoisyGradient(lambda theta: H @ theta, 1.0, 2)
    grid = np.stack(np.meshgrid(*2 * [np.linspace(-3, 3, 121)]))
    axes.contour(*grid, np.einsum("iab,ij,jab->ab", grid, H, grid), [0.5, 2, 4.5], colors="0.7")
    for name, alpha in (("SGLD", None), ("SGHMC", 0.035)):
        module, settings = sampler(0.05, alpha)
        state, path = module.init(np.zeros(2), 0.05, rng), []
        for _ in range(50):
            state, _ = module.update(state, gradient, rng=rng, **settings)
            path.append(state.position)
        colour = "C0" if alpha is None else "C3"
        axes.plot(*np.transpose(path), "o-", color=colour, lw=0.5, label=name)
    axes.set(title="Figure 3, right: first 50 samples, η = 0.05", xlabel="θ₁", ylabel="θ₂")
    axes.legend(fontsize=8)


def check(first, noise, second, third, quick):
    """End the script in words if a claim fails by more than Monte Carlo error."""
    *_, of_a_run, _, distance, _ = first["SGHMC"]
    friction, error = second["with friction (SGHMC)"][1:]
    claims = {
        "the gradient's noise is N(0, 4)": abs(noise[0]) < 0.06 and abs(noise[1] - V) < 0.16,
        "SGHMC is within 0.03 of the target": of_a_run < (0.05 if quick else 0.03),
        "naive stochastic gradient HMC is 5 times as far": first[NAIVE][-2] > 5 * distance,
        "the MH step mends it": first[NAIVE_MH][-2] < 0.01 + 2 * first[NAIVE_MH][-1],
        "noise without friction heats": second["noisy"][1] > 50,
        "friction takes it up": abs(friction - 1) < 0.01 + 4 * error,
        "covariances are right": all(abs(row[5] - row[7]) < 4 * row[6] for row in third),
        "autocorrelation times are right": all(
            abs(row[3] / row[4] - 1) < (0.4 if quick else 0.2) for row in third
        ),
        # at equal covariance error: SGLD's last setting, SGHMC's first
        "SGHMC needs at most a third of SGLD's time": third[6][3] < third[5][3] / 3,
    }
    failed = [claim for claim, holds in claims.items() if not holds]
    if failed:
        sys.exit("Not so: " + "; ".join(failed))


def report(first, noise, second, third, equal, n_steps):
    """Return tables and sentences."""
    columns = ["", "gradients in a run", "runs", "accepted", "TV of a run", "sd over runs"]
    columns += ["TV of all runs", "by chance"]
    table_1 = markdown_table(columns, [[name, *row] for name, row in first.items()])
    columns = ["dynamics", "largest θ of one path", "mean of θ²", "standard error"]
    table_2 = markdown_table(columns, [[name, *row] for name, row in second.items()])
    columns = ["", "η", "α", "1 + Σρ", "exact", "covariance error", "Monte Carlo error", "exact"]
    table_3 = markdown_table(columns, third)
    columns = ["exact covariance error", "SGHMC's η", "SGLD's η", "1 + Σρ: SGHMC", "SGLD", "ratio"]
    columns += ["of θ²: SGHMC", "SGLD", "ratio"]
    table_4 = markdown_table(columns, equal)
    return f"""\
**Figure 1.** Total variation distance (TV) from the target, of histograms with 60 bins on [−2.5, 2.5]
and two tails. HMC variants give a draw per trajectory of 50 steps, SGHMC one per 10 steps; all redraw
the momentum every 50 steps. *By chance* is what all runs would show if their law were the target.
SGHMC runs in `pm.sample`, with η = 0.01, α = 0.3, β̂ = 0.02, on a model whose minibatches of 10 rows
give the gradient noise of mean {noise[0]:.3f} and variance {noise[1]:.2f} (20,000 minibatches).

{table_1}

Naive stochastic gradient HMC is {first[NAIVE][3] / first["SGHMC"][3]:.0f} times as far off as SGHMC,
by the TV of a run. With an MH test of the exact energy it is right, since a trajectory run backwards
has the same noise with the same probability; the test takes all data and
{1 - first[NAIVE_MH][2]:.0%} of the trajectories. The authors' script draws two noises per leapfrog
step; here it is one, as in Algorithm 1, which doubles the variance of the naive variants' kicks.

**Figure 2.** 100 paths, their last 5,000 steps; the picture shows every 50th point of one. Under
exp(−U) the mean of θ² is 1. Noise is N(0, 4), as in the paper's text; the authors' script has
variance 0.25.

{table_2}

**Figure 3.** Settings are those of the authors' script: step sizes on a geometric scale (not the
linear one of the text), β̂ = ½ηV for SGHMC and, for SGLD, injected noise N(0, 2η − η²V), here
`temperature=1 - eta / 2`. SGLD's sixth η has the exact covariance error of SGHMC's first. Each line is
{N_CHAINS:,} chains of {n_steps:,} samples, {N_CHAINS * n_steps:,} in all; 1 + Σρ follows from the
variance of the chains' means, all lags included. Exact values are those of the stationary law.

{table_3}

With short steps Monte Carlo error is most of SGHMC's covariance error. At equal exact error:

{table_4}

SGHMC's autocorrelation time is {equal[0][5]:.2g} of SGLD's or less: better than a third. It is so
short as θ swings past its mean: negative autocorrelations make means precise, not variances. For θ²,
where nothing cancels, it is {equal[0][8]:.2g} of SGLD's or less. The axis of the paper's figure is
another one: the authors' script counts lags until ρ < 0.05, where the paper's text sums ρ."""


def main():
    options = common.parser(__doc__).parse_args()
    figure, axes = plt.subplots(2, 2, figsize=(13, 10), layout="constrained")
    first, noise = figure_1(axes[0, 0], options.quick, options.seed)
    second = figure_2(axes[0, 1], options.seed)
    n_steps = 1000 if options.quick else 5000
    third, equal = figure_3(axes[1, 0], n_steps, options.seed)
    first_samples(axes[1, 1], options.seed)
    text = report(first, noise, second, third, equal, n_steps)
    common.write(options.folder, "sghmc_simulated", [text], figure)
    check(first, noise, second, third, options.quick)


if __name__ == "__main__":
    main()
