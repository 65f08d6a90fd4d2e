"""What a draw costs as the data grow: logistic regression of 50 coefficients, N = 10^4 to 10^7.

    python tests/benchmarks/scaling.py [--rows 10000 100000 1000000 10000000] [--draws 2000]
        [--tune 1000] [--seed 1] [--cores 2] [--markdown] [--check-bias]
        [--set batch_size=500 n_steps=10 ...]

y ~ Bernoulli(sigmoid(X β)), β ~ N(0, 1), X standard normal in single precision; the β that made the
data are N(0, 1/50), so that logits have standard deviation about 1. X is written in chunks to a
file in a temporary folder and read through a memory map that the model shares, without a copy.
Runs ``pm.sample(step=SGHMC(batch_size=500))``, four chains, each N in a process of its own.

Prints one line of JSON and with ``--markdown`` a table; each row goes to standard error as soon as
it is there. An evaluation is that of one row's gradient, of which control variates need two. Those
per effective draw count the kept draws of all chains over their bulk effective size, the smallest
over the 50 unknowns and the mean over them (``flatness``: the largest over N by the smallest).
Fixed costs stand apart: compilation, and the mode, curvature and leverages, which take passes over
all rows (those that the step reports, a part of a pass for each evaluation of a subset; leverages
and anchor are 10 to 34 more, in the seconds). Peak memory is that of the main process and of the
largest chain's; both count the pages of X that they have touched, of which there is one copy.
``--check-bias`` times `check_bias` afterwards, as "check_bias_seconds" in the JSON.
Sampling seconds are PyMC's, tuning included, seconds per inner step those of one chain.
"""

# ruff: noqa: I001  (untouched sets the environment before NumPy is imported)
import argparse
import importlib.metadata
import json
import logging
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings

from pathlib import Path

from untouched import logged_warnings, over_unknowns, rounded, setting

import arviz as az
import numpy as np
import pymc as pm
import pytensor

from pymc_sghmc import SGHMC
from pymc_sghmc.diagnostics import check_bias, configurational_temperature

CHAINS, D, CHUNK = 4, 50, 100_000
ROWS = re.compile(r"control variates of ([\d,]+) rows|minibatches of ([\d,]+) rows")
SETUP = re.compile(
    r"took ([\d.]+) s, ([\d.]+) s of them for building and compiling .*? (\d+) passes over the data"
)


def make_data(path, n_rows):
    """X as a memory map of a new file, and y."""
    rng = np.random.default_rng(n_rows)
    beta = rng.standard_normal(D) / D**0.5
    X = np.memmap(path, dtype="float32", mode="w+", shape=(n_rows, D))
    y = np.empty(n_rows, dtype="int8")
    for start in range(0, n_rows, CHUNK):
        chunk = rng.standard_normal((min(CHUNK, n_rows - start), D), dtype="float32")
        X[start : start + CHUNK] = chunk
        y[start : start + CHUNK] = rng.random(len(chunk)) < 1 / (1 + np.exp(-chunk @ beta))
    X.flush()
    del X
    return np.memmap(path, dtype="float32", mode="r", shape=(n_rows, D)), y, beta


def logistic_model(X, y):
    # pm.Data would copy the map, and in double precision
    shared = pytensor.shared(np.zeros((1, D), dtype=X.dtype), name="X", shape=(None, D))
    shared.set_value(X, borrow=True)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=D)
        pm.Bernoulli("y", logit_p=pm.math.dot(shared, beta), observed=y)
    return model


def measure(n_rows, settings, with_check, **sample):
    """One row of the table, made in this process."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        X, y, truth = make_data(Path(folder) / "X", n_rows)
        model = logistic_model(X, y)
        row = {"data_seconds": seconds_since(start), "data_gb": round(X.nbytes / 1e9, 2)}
        said = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("pymc.sghmc").addHandler(handler)
        with logged_warnings() as texts, model:
            start = time.perf_counter()
            step = SGHMC(**{"batch_size": 500, **settings})
            row["construction_seconds"] = seconds_since(start)
            start = time.perf_counter()
            idata = pm.sample(step=step, chains=CHAINS, progressbar=False, **sample)
            row["sample_seconds"] = seconds_since(start)
        if with_check:
            start = time.perf_counter()
            check_bias(idata, model)
            row["check_bias_seconds"] = seconds_since(start)
        log = "\n".join(said)
        setup_seconds, compile_seconds, passes = map(float, SETUP.search(log).groups())
    row |= {
        "passes": passes,
        "setup_seconds": setup_seconds,
        "compile_seconds": compile_seconds,
        "sampling_seconds": round(float(idata.posterior.attrs["sampling_time"]), 1),
    }
    x = idata.posterior["beta"].transpose("chain", "draw", ...).values
    stats = idata.sample_stats
    cv = np.asarray(stats["control_variates"].values, dtype=float).mean()
    n_steps = float(stats["inner_steps"].values.mean())
    [batch_size] = step.tuner.gradient.data.batch_sizes
    if found := ROWS.search(log):  # batch_size="auto"
        batch_size = int((found[1] or found[2]).replace(",", ""))
    evaluations = x.shape[0] * x.shape[1] * n_steps * batch_size * (1 + cv)
    ess = over_unknowns(az.ess, x)
    parallel = min(CHAINS, sample["cores"])
    inner_steps = CHAINS * (sample["draws"] + sample["tune"]) * n_steps
    [temperature], [error] = configurational_temperature(idata)
    peak = [
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return row | {
        "draws": list(x.shape[:2]),
        "microseconds_per_inner_step": round(
            1e6 * row["sampling_seconds"] * parallel / inner_steps, 1
        ),
        "min_ess": rounded(ess.min())[0],
        "mean_ess": rounded(ess.mean(), ess.std() / D**0.5),
        "evaluations_per_effective_draw": rounded(evaluations / ess.min())[0],
        "evaluations_per_mean_effective_draw": rounded(evaluations / ess.mean())[0],
        "temperature": rounded(temperature, error),
        "max_r_hat": rounded(over_unknowns(az.rhat, x).max())[0],
        "mean_distance_from_truth": rounded(
            np.mean(((x.mean(axis=(0, 1)) - truth) / x.std(axis=(0, 1))) ** 2) ** 0.5
        )[0],
        "learning_rate": rounded(np.mean(stats["learning_rate"].values))[0],
        "friction": rounded(np.mean(stats["friction"].values))[0],
        "control_variates": cv,
        "peak_gb": rounded(*(kib * 1024 / 1e9 for kib in peak)),
        "warnings": [text.splitlines()[0] for text in texts],
    }


def seconds_since(start):
    return round(time.perf_counter() - start, 1)


def flatness(rows, key):
    values = [row[key] for row in rows.values() if key in row]
    return round(max(values) / min(values), 3) if values else None


def markdown(result):
    titles = "compile s, mode etc. s, passes, sampling s, µs per inner step, min ESS, mean ESS, "
    titles += "evaluations per effective draw (min), (mean), T_conf, η, α, control variates, "
    titles = ["N", *(titles + "X GB, peak GB main; chain").split(", ")]
    lines = ["| " + " | ".join(titles) + " |", "|---:" * len(titles) + "|"]
    for n_rows, row in result["runs"].items():
        if "failed" in row:
            lines.append(f"| {int(n_rows):,} | {row['failed']}" + " |" * (len(titles) - 1))
            continue
        cells = [
            f"{int(n_rows):,}",
            f"{row['compile_seconds']:.1f}",
            f"{row['setup_seconds']:.1f}",
            f"{row['passes']:.0f}",
            f"{row['sampling_seconds']:.1f}",
            f"{row['microseconds_per_inner_step']:.0f}",
            f"{row['min_ess']:,.0f}",
            "{:,.0f} ± {:,.0f}".format(*row["mean_ess"]),
            f"{row['evaluations_per_effective_draw']:,.0f}",
            f"{row['evaluations_per_mean_effective_draw']:,.0f}",
            "{:.3f} ± {:.3f}".format(*row["temperature"]),
            f"{row['learning_rate']}",
            f"{row['friction']}",
            f"{row['control_variates']:.0%}",
            f"{row['data_gb']}",
            "; ".join(f"{gb:.1f}" for gb in row["peak_gb"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += [
        "",
        f"Largest over smallest: {result['flatness']}. {result['arguments']}, {result['sample']}, "
        f"{CHAINS} chains; load {result['load'][0]} before and {result['load'][1]} after, of "
        f"{result['processors']} processors. {versions}.",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10**k for k in (4, 5, 6, 7)])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--tune", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    parser.add_argument("--check-bias", action="store_true", help="time check_bias as well")
    parser.add_argument("--set", nargs="+", default=[], type=setting, metavar="KEY=VALUE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of forks, of BLAS; PyMC's and ours about the run are logged
    sample = dict(draws=args.draws, tune=args.tune, cores=args.cores, random_seed=args.seed)
    if args.worker:
        print(json.dumps(measure(args.rows[0], dict(args.set), args.check_bias, **sample)))
        return
    load, runs = [round(os.getloadavg()[0], 1)], {}
    rest = [arg for arg in sys.argv[1:] if arg != "--markdown"]
    for n_rows in args.rows:
        command = [sys.executable, __file__, *rest, "--worker", "--rows", str(n_rows)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        runs[n_rows] = {"failed": f"exit status {done.returncode}"}
        if done.returncode == 0:
            runs[n_rows] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps({n_rows: runs[n_rows]}), file=sys.stderr, flush=True)
    packages = "numpy", "pymc", "pytensor", "arviz", "numba", "pymc-sghmc"
    keys = "evaluations_per_effective_draw", "evaluations_per_mean_effective_draw"
    result = {
        "benchmark": "scaling",
        "unknowns": D,
        "arguments": {"batch_size": 500, **dict(args.set)},
        "sample": sample,
        "processors": len(os.sched_getaffinity(0)),
        "load": [*load, round(os.getloadavg()[0], 1)],
        "flatness": {key: flatness(runs, key) for key in (*keys, "microseconds_per_inner_step")},
        "runs": runs,
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in packages},
        },
    }
    print(json.dumps(result))
    if args.markdown:
        print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
