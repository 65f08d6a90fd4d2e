"""What a PyMC user would run on the quickstart's model, side by side: speed and correctness.

    taskset -c 0,1 python tests/benchmarks/compare.py [--reference FILE] [--markdown]

The model and data are those of ``examples/quickstart.py``: negative binomial regression, 20,190
rows, 11 parameters, which needs statsmodels and matplotlib. Compared are full-data NUTS of PyMC and
nutpie, ADVI and NUTS on a model with ``pm.Minibatch``, SGHMC and SGLD with the settings that they
choose, and SGHMC with the paper's. Four chains on two cores throughout. The reference for each
posterior is a long NUTS run of four chains of 4,000 draws. ``--reference`` names a file that keeps
its means and standard deviations for the next time.

Prints one line of JSON and with ``--markdown`` a table. Seconds in all include compilation and the
mode and curvature that SGHMC and SGLD look for, but not building the model. PyTensor's caches on
disk are used as they are: run the script twice for times without compilation. Seconds of sampling
include tuning, and so does the time by which effective draws per second are divided.
``min_ess_bulk`` and the errors are the worst of the 11 parameters. An effective sample size means
nothing where the posterior is wrong: read it beside the errors. The draws of ADVI are independent
and have none. Tools that are missing or refuse are listed with their message.
"""

import os

# Chains run in processes of their own: BLAS threads in each would fight for the same two cores.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import importlib.metadata
import json
import logging
import platform
import sys
import time
import warnings

from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import arviz as az
    import pymc as pm

    from quickstart import draws_by_parameter, read_data, visits_model

    from pymc_sghmc import SGHMC, SGLD
    from pymc_sghmc.diagnostics import configurational_temperature

BATCH = 500
CORES = 2
CHAINS = 4
ADVI_ITERATIONS = 60_000  # PyMC's default of 10,000 leaves sds 10 times too large here.
SAMPLE = {"chains": CHAINS, "cores": CORES, "random_seed": 1, "progressbar": False}
REFERENCE = {**SAMPLE, "draws": 4000, "tune": 1000, "random_seed": 2}
NUTS = {**SAMPLE, "draws": 500, "tune": 300, "nuts_sampler": "pymc"}
OURS = {**SAMPLE, "draws": 1000, "tune": 1000}


def minibatch_model(predictors, visits):
    """Return `visits_model` as PyMC's documentation writes it for minibatches."""
    with pm.Model(coords={"predictor": predictors.columns}) as model:
        # With int64, PyMC casts the minibatch to int32 and then refuses it as observed data.
        X, y = pm.Minibatch(predictors.to_numpy(), visits.to_numpy("int32"), batch_size=BATCH)
        intercept = pm.Normal("intercept", 0, 2)
        beta = pm.Normal("beta", 0, 1, dims="predictor")
        alpha = pm.HalfNormal("alpha", 2)
        mu = pm.math.exp(intercept + X @ beta)
        pm.NegativeBinomial("visits", mu=mu, alpha=alpha, observed=y, total_size=len(visits))
    return model


def sample(model, **settings):
    """Return draws and what ``pm.sample`` says that sampling took, tuning included."""
    with model:
        idata = pm.sample(**settings)
    return idata, float(idata.posterior.attrs["sampling_time"])


def nuts(full, minibatch):
    return sample(full, **NUTS)


def nutpie(full, minibatch):
    import nutpie

    compiled = nutpie.compile_pymc_model(full)
    start = time.perf_counter()
    idata = nutpie.sample(
        compiled,
        draws=NUTS["draws"],
        tune=NUTS["tune"],
        chains=CHAINS,
        cores=CORES,
        seed=1,
        progress_bar=False,
    )
    return idata, time.perf_counter() - start


def advi(full, minibatch):
    first = []

    def compiled(approximation, losses, iteration):
        if not first:
            first.append(time.perf_counter())

    with minibatch:
        approximation = pm.fit(
            ADVI_ITERATIONS,
            method="advi",
            callbacks=[compiled],
            random_seed=1,
            progressbar=False,
        )
    fitted = time.perf_counter() - first[0]
    return approximation.sample(20_000, random_seed=1), fitted


def nuts_on_minibatches(full, minibatch):
    return sample(minibatch, **{**NUTS, "draws": 200, "tune": 200})


def sghmc_auto(full, minibatch):
    with full:
        step = SGHMC(batch_size="auto")
    return sample(full, step=step, **OURS)


def sghmc(full, minibatch):
    with full:
        step = SGHMC(batch_size=BATCH)
    return sample(full, step=step, **OURS)


def sghmc_of_the_paper(full, minibatch):
    n_rows = full["visits"].shape[0].eval()
    with full:
        step = SGHMC(
            batch_size=BATCH,
            learning_rate=0.1 / n_rows,
            friction=0.1,
            noise_estimate=None,
            gradient="plain",
            integrator="euler",
            n_steps=40,
        )
    return sample(full, step=step, **OURS)


def sgld(full, minibatch):
    with full:
        step = SGLD(batch_size=BATCH)
    return sample(full, step=step, **OURS)


RUNS = {
    "NUTS (PyMC), all rows": nuts,
    "NUTS (nutpie), all rows": nutpie,
    f"ADVI on pm.Minibatch, {ADVI_ITERATIONS:,} iterations": advi,
    "NUTS (PyMC) on pm.Minibatch, 200 draws": nuts_on_minibatches,
    'SGHMC(batch_size="auto")': sghmc_auto,
    f"SGHMC(batch_size={BATCH})": sghmc,
    f"SGLD(batch_size={BATCH})": sgld,
    "SGHMC, the paper's settings by hand": sghmc_of_the_paper,
}


def as_float(statistic):
    """Return as a number what ArviZ computes from an array of shape (chain, draw)."""
    return float(np.squeeze(statistic))


def reference(full, path):
    """Means and standard deviations of a long NUTS run, from ``path`` if it is there."""
    if path and path.exists():
        return json.loads(path.read_text())
    idata, seconds = sample(full, nuts_sampler="pymc", **REFERENCE)
    parameters = {}
    for name, draws in draws_by_parameter(idata).items():
        mean, sd = float(draws.mean()), float(draws.std())
        parameters[name] = {
            "mean": mean,
            "sd": sd,
            "mcse_mean_in_sds": as_float(az.mcse(draws)) / sd,
            "mcse_sd_ratio": as_float(az.mcse((draws - mean) ** 2)) / (2 * sd**2),
            "ess_bulk": as_float(az.ess(draws)),
            "r_hat": as_float(az.rhat(draws)),
        }
    result = {
        "chains": REFERENCE["chains"],
        "draws": REFERENCE["draws"],
        "pymc": pm.__version__,
        "sampling_seconds": round(seconds, 1),
        "parameters": parameters,
    }
    if path:
        path.write_text(json.dumps(result))
    return result


def measure(run, models, parameters):
    """Run one sampler; return the row of the table."""
    start, load = time.perf_counter(), os.getloadavg()[0]
    try:
        idata, sampling = run(*models)
    except Exception as error:  # A tool that is missing, refuses or gives up is a row of its own.
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    seconds = time.perf_counter() - start
    draws = draws_by_parameter(idata)
    errors = [(draws[n].mean() - true["mean"]) / true["sd"] for n, true in parameters.items()]
    ratios = [draws[name].std() / true["sd"] for name, true in parameters.items()]
    row = {
        "seconds": round(seconds, 1),
        "sampling_seconds": round(sampling, 1),
        "min_ess_bulk": None,
        "min_ess_bulk_per_second": None,
        "max_mean_error_in_sds": float(f"{np.abs(errors).max():.3g}"),
        "sd_ratio": [float(f"{ratio:.3g}") for ratio in (min(ratios), max(ratios))],
        "load": round(load, 1),
    }
    if run is not advi:
        ess = min(as_float(az.ess(draws[name])) for name in parameters)
        row["min_ess_bulk"] = round(ess)
        row["min_ess_bulk_per_second"] = float(f"{ess / sampling:.3g}")
        r_hat = max(as_float(az.rhat(draws[name])) for name in parameters)
        row["max_r_hat"] = float(f"{r_hat:.4g}") if np.isfinite(r_hat) else None
    if "diverging" in getattr(idata, "sample_stats", {}):
        row["diverging"] = round(float(np.mean(idata.sample_stats["diverging"])), 3)
    temperature, error = configurational_temperature(idata)
    if len(temperature):
        row["configurational_temperature"] = [
            round(float(temperature[0]), 3),
            round(float(error[0]), 3),
        ]
    return row


def short(x):
    """Return a number with two decimals, none if it is large."""
    return f"{x:.2f}" if x < 10 else f"{x:.0f}"


def markdown(result):
    titles = [
        "",
        "seconds in all",
        "effective draws per second",
        "largest mean error, posterior sds",
        "sd ratios",
        "configurational temperature",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for name, row in result["runs"].items():
        if "failed" in row:
            lines.append(f"| {name} | skipped: {row['failed']}" + " |" * (len(titles) - 1))
            continue
        temperature = row.get("configurational_temperature")
        cells = [
            name,
            f"{row['seconds']:.1f}",
            "–" if row["min_ess_bulk"] is None else f"{row['min_ess_bulk_per_second']:,.5g}",
            short(row["max_mean_error_in_sds"]),
            " to ".join(short(ratio) for ratio in row["sd_ratio"]),
            "{:.3f} ± {:.3f}".format(*temperature) if temperature else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    moments = result["reference"]["parameters"].values()
    least_ess = min(row["ess_bulk"] for row in moments)
    mean_error = max(row["mcse_mean_in_sds"] for row in moments)
    sd_error = max(row["mcse_sd_ratio"] for row in moments)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += [
        "",
        f"{versions}. {CHAINS} chains, cores={CORES}, on {result['processors']} processors; load "
        f"{result['load'][0]} at the start, {result['load'][1]} at the end. Reference: NUTS of "
        f"PyMC {result['reference']['pymc']}, {result['reference']['chains']} × "
        f"{result['reference']['draws']:,} draws, least bulk ESS "
        f"{least_ess:,.0f}, Monte Carlo standard error of means at most {mean_error:.3f} posterior "
        f"sds, of sds at most {100 * sd_error:.1f} %.",
    ]
    return "\n".join(lines)


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--reference", type=Path, help="file that keeps the long NUTS run's moments"
    )
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    parser.add_argument("--only", default="", help="run those whose name contains this")
    args = parser.parse_args()
    # The table says what the samplers' warnings would, and PyMC's notes on backends cost only time.
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.CRITICAL)
    load = [round(os.getloadavg()[0], 1)]
    predictors, visits = read_data()
    models = visits_model(predictors, visits), minibatch_model(predictors, visits)
    truth = reference(models[0], args.reference)
    runs = {}
    for name, run in RUNS.items():
        if args.only in name:
            print(f"{name} …", file=sys.stderr, flush=True)
            runs[name] = measure(run, models, truth["parameters"])
    packages = "numpy", "pymc", "pytensor", "arviz", "nutpie", "pymc-sghmc"
    result = {
        "benchmark": "compare",
        "rows": len(visits),
        "batch": BATCH,
        "chains": CHAINS,
        "cores": CORES,
        "processors": len(os.sched_getaffinity(0)),
        "load": [*load, round(os.getloadavg()[0], 1)],
        "runs": runs,
        "reference": truth,
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages if version(package)},
        },
    }
    print(json.dumps(result))
    if args.markdown:
        print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
