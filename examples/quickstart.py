"""Doctor visits in the RAND health insurance experiment: SGHMC on minibatches beside full-data NUTS.

Run ``python examples/quickstart.py [folder for quickstart.png]``. It needs statsmodels, which
brings the data, and matplotlib. The script compares the two posteriors and fails if they differ.
"""

import sys
import time
import warnings

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from scipy.stats import gaussian_kde
from statsmodels.datasets import randhie

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import arviz as az
    import pymc as pm

    from pymc_sghmc import SGHMC
    from pymc_sghmc.diagnostics import configurational_temperature

matplotlib.use("Agg")

import matplotlib.pyplot as plt

PREDICTORS = {
    "lncoins": "log coinsurance",
    "idp": "individual deductible",
    "lpi": "log incentive payment",
    "fmde": "log maximum expenditure",
    "physlm": "physical limitation",
    "disea": "chronic diseases",
    "hlthg": "health good",
    "hlthf": "health fair",
    "hlthp": "health poor",
}
PROGRESS = sys.stdout.isatty()


def visits_model(predictors, visits):
    """Return a negative binomial regression: an ordinary PyMC model of all rows."""
    coords = {"predictor": predictors.columns, "row": predictors.index}
    with pm.Model(coords=coords) as model:
        X = pm.Data("X", predictors, dims=("row", "predictor"))
        y = pm.Data("y", visits, dims="row")
        intercept = pm.Normal("intercept", 0, 2)
        beta = pm.Normal("beta", 0, 1, dims="predictor")
        alpha = pm.HalfNormal("alpha", 2)
        mu = pm.math.exp(intercept + X @ beta)
        pm.NegativeBinomial("visits", mu=mu, alpha=alpha, observed=y, dims="row")
    return model


def sample_nuts(model):
    with model:
        return pm.sample(
            500, tune=300, chains=4, nuts_sampler="pymc", random_seed=1, progressbar=PROGRESS
        )


def laplace_covariance(model):
    """Inverse Hessian at the mode, in the unconstrained unknowns: one preconditioner for SGHMC."""
    with model:
        mode = pm.find_MAP(progressbar=False)
        return np.linalg.inv(-pm.find_hessian(mode, negate_output=False))


def sample_sghmc(model, covariance):
    with model:
        step = SGHMC(
            batch_size=500,
            learning_rate=0.01,
            friction=0.5,
            noise_estimate="diag",
            preconditioner=covariance,
            n_steps=40,
        )
        return pm.sample(1000, tune=300, chains=4, step=step, random_seed=1, progressbar=PROGRESS)


def main(folder):
    # PyMC 6 announces what find_MAP will return. PyTensor from pip has no BLAS for its C code, and
    # Numba calls SciPy for the second derivative of the gamma function: both cost only time.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", "PyTensor could not link to a BLAS")
    warnings.filterwarnings("ignore", "Numba will use object mode")
    start = time.perf_counter()
    data = randhie.load_pandas().data
    predictors = data[list(PREDICTORS)].rename(columns=PREDICTORS)
    predictors = (predictors - predictors.mean()) / predictors.std()

    model = visits_model(predictors, data["mdvis"])
    nuts, nuts_time = timed(sample_nuts, model)
    covariance, covariance_time = timed(laplace_covariance, model)
    sghmc, sghmc_time = timed(sample_sghmc, model, covariance)

    nuts_draws, sghmc_draws = draws_by_name(nuts), draws_by_name(sghmc)
    rows = {name: compare(sghmc_draws[name], nuts_draws[name]) for name in nuts_draws}
    table = pd.DataFrame(rows).T
    print(f"\n{table.to_string(formatters=formats(table))}\n")
    temperature, error = configurational_temperature(sghmc)
    print(
        f"Configurational temperature of SGHMC: {temperature[0]:.3f} ± {error[0]:.3f} "
        "(1 under the right posterior)"
    )
    print(f"Mode and Hessian: {covariance_time:5.1f} s")
    for name, seconds in (("SGHMC", sghmc_time), ("NUTS", nuts_time)):
        ess = table[name, "ess_bulk"].min()
        print(f"{name + ':':17} {seconds:5.1f} s, {ess / seconds:.0f} effective draws per second")
    print(
        f"For {len(data):,} rows NUTS is a fine choice: each of its gradients reads them all. One "
        "of SGHMC\nreads 500, however many rows there are; but the more there are, the noisier it "
        "is, and the\nlower the learning rate has to be."
    )
    path = Path(folder) / "quickstart.png"
    plot(nuts_draws, sghmc_draws, len(data), path)
    print(f"Picture: {path}. Time in all: {time.perf_counter() - start:.0f} s.")
    check(table)


def timed(function, *args):
    start = time.perf_counter()
    return function(*args), time.perf_counter() - start


def draws_by_name(idata):
    """Draws of each scalar unknown, arrays of shape (chain, draw)."""
    posterior = idata.posterior
    draws = {"intercept": posterior["intercept"].values}
    for name in posterior["predictor"].values:
        draws[name] = posterior["beta"].sel(predictor=name).values
    return {**draws, "alpha": posterior["alpha"].values}


def compare(sghmc, nuts):
    """One unknown's row of the table, differences with their Monte Carlo standard errors."""
    row, mean_errors, sd_errors = {}, [], []
    for sampler, draws in (("SGHMC", sghmc), ("NUTS", nuts)):
        mean, sd = draws.mean(), draws.std()
        row[sampler, "mean"], row[sampler, "sd"] = mean, sd
        row[sampler, "ess_bulk"] = as_float(az.ess(draws))
        row[sampler, "r_hat"] = as_float(az.rhat(draws))
        mean_errors.append(as_float(az.mcse(draws)))
        sd_errors.append(as_float(az.mcse((draws - mean) ** 2)) / (2 * sd))
    sd = row["NUTS", "sd"]
    row["means apart, in sds", "by"] = (row["SGHMC", "mean"] - row["NUTS", "mean"]) / sd
    row["means apart, in sds", "±"] = np.hypot(*mean_errors) / sd
    row["ratio of sds", "is"] = row["SGHMC", "sd"] / sd
    row["ratio of sds", "±"] = np.hypot(*sd_errors) / sd
    return row


def as_float(statistic):
    """ArviZ returns numbers of one kind or another for an array of shape (chain, draw)."""
    return float(np.squeeze(statistic))


def formats(table):
    decimals = {"mean": 3, "sd": 4, "ess_bulk": 0, "r_hat": 3}
    return {column: f"{{:.{decimals.get(column[1], 2)}f}}".format for column in table.columns}


def check(table):
    """Fail if a mean or standard deviation is off by more than its error explains."""
    means, ratios = table["means apart, in sds"], table["ratio of sds"]
    mean_off = means["by"].abs() > 0.1 + 4 * means["±"]
    sd_off = (ratios["is"] - 1).abs() > 0.1 + 4 * ratios["±"]
    wrong = table.index[mean_off | sd_off]
    if len(wrong):
        sys.exit(f"Check failed: SGHMC and NUTS disagree on {', '.join(wrong)}.")
    print("Check passed: SGHMC and NUTS agree on all means and standard deviations.")


def plot(nuts_draws, sghmc_draws, n_rows, path):
    """Posterior densities of all unknowns, SGHMC over NUTS."""
    figure, axes = plt.subplots(3, 4, figsize=(11, 7), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1)
    *panels, legend = axes.flat
    for axis, (name, nuts) in zip(panels, nuts_draws.items(), strict=True):
        sghmc = sghmc_draws[name]
        both = np.concatenate([nuts.ravel(), sghmc.ravel()])
        x = np.linspace(both.min(), both.max(), 200)
        axis.fill_between(x, gaussian_kde(nuts.ravel())(x), color="0.8", label="NUTS, all rows")
        axis.plot(
            x, gaussian_kde(sghmc.ravel())(x), color="C3", label="SGHMC, 500 rows per gradient"
        )
        axis.set_title(name, fontsize=11)
        axis.set_ylim(bottom=0)
        axis.set_yticks([])
        axis.locator_params(axis="x", nbins=4)
        axis.spines[["left", "top", "right"]].set_visible(False)
    legend.axis("off")
    legend.legend(*panels[0].get_legend_handles_labels(), loc="center", frameon=False)
    figure.suptitle(
        f"Negative binomial regression of doctor visits in {n_rows:,} person-years: "
        "the posterior by SGHMC and by NUTS",
        fontsize=13,
    )
    figure.supxlabel(
        "coefficient, in log visits per standard deviation of the predictor", fontsize=11
    )
    figure.supylabel("posterior density", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["."])
