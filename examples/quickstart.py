"""Doctor visits in the RAND health insurance experiment: SGHMC, then NUTS for comparison.

Run ``python examples/quickstart.py [--no-nuts] [--folder FOLDER]``.

SGHMC samples a negative binomial regression of 20,190 rows. The script prints the posterior and
two checks of it, and draws quickstart.png. Then NUTS samples the same model, and the script fails
if the two posteriors differ.
"""

import argparse
import logging
import signal
import sys
import textwrap
import threading
import time
import warnings

from pathlib import Path

import numpy as np
import pandas as pd

from matplotlib.figure import Figure
from scipy.stats import gaussian_kde
from statsmodels.datasets import randhie

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import arviz as az
    import pymc as pm

    from pymc_sghmc import SGHMC
    from pymc_sghmc.diagnostics import check_bias, configurational_temperature

PREDICTORS = {
    "lncoins": "log coinsurance",
    "idp": "individual deductible",
    "lpi": "log incentive payment",
    "fmde": "log maximum expenditure",
    "physlm": "physical limitation",
    "disea": "chronic diseases",
    "hlthg": "good health",
    "hlthf": "fair health",
    "hlthp": "poor health",
}
COLUMNS = {"mean": "mean", "sd": "posterior sd", "ess_bulk": "effective draws", "r_hat": "R-hat"}
COLOURS = {"NUTS": "tab:gray", "SGHMC": "tab:red"}
TOLERANCE = 0.1  # posterior sds that SGHMC may be off, besides Monte Carlo error
IN_TERMINAL = sys.stdout.isatty()
SETTINGS = {"chains": 4, "random_seed": 1, "progressbar": IN_TERMINAL}
NUTS_DRAWS = 500  # tuning draws and draws of each chain, half of PyMC's default


def main(with_nuts, folder):
    """Sample with SGHMC, check and draw; then compare with NUTS."""
    prepare_output()
    picture = folder / "quickstart.png"
    predictors, visits = read_data()
    model = visits_model(predictors, visits)

    say(f"SGHMC samples {len(visits):,} rows. The first run also compiles, for half a minute.")
    start = time.perf_counter()
    sghmc = sample_sghmc(model)
    sghmc_summary = summarise(sghmc)
    print_table(sghmc_summary[list(COLUMNS)].rename(columns=COLUMNS))
    say(f"SGHMC took {time.perf_counter() - start:.0f} s, compilation included.")
    check(sghmc, model)
    draw({"SGHMC": sghmc}, picture)
    say(f"Picture: {picture}")
    if not with_nuts:
        return

    say(
        "NUTS, for comparison, reads all rows for each gradient. To save time, it makes half as "
        "many draws. You can stop it with Ctrl-C: the results above stay."
    )
    start = time.perf_counter()
    nuts = sample_nuts(model)
    say(f"NUTS took {time.perf_counter() - start:.0f} s, compilation included.")
    draw({"NUTS": nuts, "SGHMC": sghmc}, picture)
    compare(sghmc_summary, summarise(nuts))


def read_data():
    """Return standardised predictors and the number of visits, a row per person and year."""
    data = randhie.load_pandas().data
    predictors = data[list(PREDICTORS)].rename(columns=PREDICTORS)
    return (predictors - predictors.mean()) / predictors.std(), data["mdvis"]


def visits_model(predictors, visits):
    """Return a negative binomial regression: an ordinary PyMC model of all rows."""
    with pm.Model(coords={"predictor": predictors.columns}) as model:
        intercept = pm.Normal("intercept", 0, 2)
        beta = pm.Normal("beta", 0, 1, dims="predictor")
        alpha = pm.HalfNormal("alpha", 2)
        mu = pm.math.exp(intercept + predictors.to_numpy() @ beta)
        pm.NegativeBinomial("visits", mu=mu, alpha=alpha, observed=visits)
    return model


def sample_sghmc(model):
    """Sample from minibatches. The step chooses its own settings."""
    with model:
        step = SGHMC()
        return pm.sample(step=step, **SETTINGS)


def sample_nuts(model):
    """Sample with PyMC's NUTS, from all rows."""
    with model:
        return pm.sample(
            NUTS_DRAWS, tune=NUTS_DRAWS, nuts_sampler="pymc", callback=watcher(), **SETTINGS
        )


def summarise(idata):
    """Return ArviZ's summary, a row for each parameter."""
    summary = az.summary(idata, round_to="none").astype({"ess_bulk": int})
    return summary.rename(index=lambda name: name.removeprefix("beta[").removesuffix("]"))


def check(idata, model):
    """Print two estimates of how far off SGHMC's draws are."""
    temperature, error = configurational_temperature(idata)
    say(
        f"Configurational temperature: {temperature[0]:.3f} ± {error[0]:.3f}. It is 1 for the "
        "right posterior, and 1.1 if variances are about 10 % too large."
    )
    say("check_bias compares 400 draws with the gradients of all rows ...")
    report = check_bias(idata, model)
    say(str(report).splitlines()[0])


def compare(sghmc, nuts):
    """Print both posteriors; fail if they differ by more than Monte Carlo error explains."""
    table = pd.DataFrame(index=nuts.index)
    for name in ("mean", "sd"):
        table[f"SGHMC {name}"] = sghmc[name]
        table[f"NUTS {name}"] = nuts[name]
    table["means apart, sds"] = (sghmc["mean"] - nuts["mean"]) / nuts["sd"]
    print_table(table)

    is_wrong = pd.Series(False, index=nuts.index)
    for name in ("mean", "sd"):
        difference = (sghmc[name] - nuts[name]).abs()
        error = np.hypot(sghmc[f"mcse_{name}"], nuts[f"mcse_{name}"])
        is_wrong |= difference > TOLERANCE * nuts["sd"] + 4 * error
    wrong = nuts.index[is_wrong]
    if len(wrong):
        sys.exit(f"\nCheck failed: SGHMC and NUTS differ on {', '.join(wrong)}.")
    say("Check passed: SGHMC and NUTS agree on all means and posterior standard deviations.")


def draw(runs, path):
    """Draw the posterior density of each parameter, by each sampler."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    *panels, legend = figure.subplots(3, 4).flat
    for sampler, idata in runs.items():
        for axes, (name, draws) in zip(panels, draws_by_parameter(idata).items(), strict=True):
            x = np.linspace(draws.min(), draws.max(), 200)
            density = gaussian_kde(draws.ravel())(x)
            axes.plot(x, density, color=COLOURS[sampler], label=sampler)
            axes.fill_between(x, density, color=COLOURS[sampler], alpha=0.2)
            axes.set(title=name, yticks=[])
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", nbins=3)
        axes.spines[["left", "top", "right"]].set_visible(False)
    legend.axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    legend.legend(handles, labels, loc="center", frameon=False, fontsize="x-large")
    figure.supylabel("posterior density")
    figure.savefig(path, dpi=110)


def draws_by_parameter(idata):
    """Return the draws of each parameter, arrays of shape (chain, draw)."""
    posterior = idata.posterior
    draws = {"intercept": posterior["intercept"].values}
    for name in posterior["predictor"].values:
        draws[name] = posterior["beta"].sel(predictor=name).values
    draws["alpha"] = posterior["alpha"].values
    return draws


def print_table(table):
    """Print a row for each parameter."""
    text = table.rename_axis(columns="parameter").to_string(float_format="{:.4f}".format)
    print(f"\n{text}", flush=True)


def say(text):
    """Print a paragraph of 80 columns at once."""
    print(f"\n{textwrap.fill(text, 80)}", flush=True)


class WrappedLines(logging.Formatter):
    """Wraps what PyMC and the step log."""

    def format(self, record):
        """Return the message in lines of at most 80 columns."""
        return textwrap.fill(super().format(record), 80)


def prepare_output():
    """Wrap log lines, and hide what PyTensor says about speed."""
    warnings.filterwarnings("ignore", "PyTensor could not link to a BLAS")
    warnings.filterwarnings("ignore", "Numba will use object mode")
    for handler in logging.getLogger("pymc").handlers:
        handler.setFormatter(WrappedLines())


def watcher():
    """Return a callback for ``pm.sample`` that prints progress and ends the script at Ctrl-C.

    PyMC by itself would go on with the next chain, and shows progress only in a terminal.
    """
    is_interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda signal_number, frame: is_interrupted.set())

    def watch(trace, draw):
        if is_interrupted.is_set():
            say("NUTS was stopped. The results of SGHMC stay.")
            sys.exit()
        if not IN_TERMINAL and draw.draw_idx % NUTS_DRAWS == 0:
            print(f"Chain {draw.chain}: draw {draw.draw_idx:,} of {2 * NUTS_DRAWS:,}", flush=True)

    return watch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-nuts", action="store_true", help="stop after SGHMC")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder for quickstart.png")
    arguments = parser.parse_args()
    main(not arguments.no_nuts, arguments.folder)
