"""Doctor visits in the RAND health insurance experiment: SGHMC on minibatches beside full-data NUTS.

Run ``python examples/quickstart.py [folder for quickstart.png]``. It needs statsmodels, which
brings the data, and matplotlib. SGHMC finds its settings itself. The script compares the two
posteriors and fails if they differ.
"""

import sys
import textwrap
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
    from pymc_sghmc.diagnostics import check_bias, configurational_temperature

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
            1000, tune=500, chains=4, nuts_sampler="pymc", random_seed=1, progressbar=PROGRESS
        )


def sample_sghmc(model):
    with model:
        step = SGHMC(batch_size=500)
        return pm.sample(1000, tune=1000, chains=4, step=step, random_seed=1, progressbar=PROGRESS)


def main(folder):
    # PyTensor from pip has no BLAS for its C code, which costs only time.
    warnings.filterwarnings("ignore", "PyTensor could not link to a BLAS")
    start = time.perf_counter()
    data = randhie.load_pandas().data
    predictors = data[list(PREDICTORS)].rename(columns=PREDICTORS)
    predictors = (predictors - predictors.mean()) / predictors.std()

    model = visits_model(predictors, data["mdvis"])
    nuts, nuts_time = timed(sample_nuts, model)
    sghmc, sghmc_time = timed(sample_sghmc, model)

    nuts_draws, sghmc_draws = draws_by_name(nuts), draws_by_name(sghmc)
    rows = {name: compare(sghmc_draws[name], nuts_draws[name]) for name in nuts_draws}
    table = pd.DataFrame(rows).T
    print(f"\n{table.to_string(formatters=formats(table))}\n")
    temperature, error = configurational_temperature(sghmc)
    print(
        f"Configurational temperature of SGHMC, 1 if right: {temperature[0]:.3f} ± {error[0]:.3f}"
    )
    report = check_bias(sghmc, model)
    print(textwrap.fill(f"check_bias: {str(report).splitlines()[0]}", 110))
    for name, seconds in (("NUTS", nuts_time), ("SGHMC", sghmc_time)):
        ess = table[name, "ess_bulk"].min()
        print(f"{name + ':':6} {seconds:5.1f} s, {ess / seconds:.0f} effective draws per second")
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
