"""Posteriors from files of many rows: set-up, memory, effective draws per second, and errors.

    python tests/benchmarks/sources.py [--rows 1e7] [--folder DIR] [--sources memmap parquet]
        [--orders shuffled outcome predictor month] [--pool auto] [--checks] [--markdown]

Logistic regression of 20 predictors in single precision, ``SGHMC(data=...)`` untouched, four chains
of 1,000 draws on two processes. Files lie in the order of random rows, of the outcome, of the first
predictor, or of twelve months between which two predictors drift by three sds; Parquet has row groups of 1,000,000 rows. Sources:

    memmap     ``data={"X": np.memmap, "y": np.memmap}``
    loader     ``data=ArrayLoader(...)`` of the same files
    parquet    ``data=ParquetLoader(...)``

Each run is a process of its own. The reference is Newton's method on all rows, whose Gaussian is
the posterior to 10⁻³ standard deviations at 10⁶ rows and more. ``mean_error`` is the largest error
of a mean in posterior standard deviations, ``sd_error`` the largest relative one of a standard
deviation, ``mean_mc`` and ``sd_mc`` their Monte Carlo standard errors; ``private_mb`` the process's
own memory at its peak while the step is made, without pages of files, above what it had before.
With ``--checks`` ``check_bias(idata, step, n_draws=40)`` and ``loo(idata, step)`` follow, with
seconds, and the process's own memory at its peak above what it had before; ``loo_error`` is the
standard error of the subsampling, in units of elpd. Files of 81 bytes a row and source are deleted at the end. Prints one line of JSON.
"""

import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings

from pathlib import Path

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import arviz as az
    import pymc as pm
    import report

    from scipy.stats import norm
    from streams import peak_of, private_mb

    from pymc_sghmc import SGHMC
    from pymc_sghmc.diagnostics import check_bias, loo
    from pymc_sghmc.loaders import ArrayLoader, ParquetLoader

D, CHUNK, GROUP = 20, 500_000, 1_000_000
SOURCES = ["memmap", "loader", "parquet"]
ORDERS = ["shuffled", "outcome", "predictor", "month"]
PACKAGES = ("numpy", "pymc", "pytensor", "pymc-sghmc", "pyarrow")


def write(folder, n_rows, order, parquet):
    """Write X and y to raw files and, on request, the same rows to a Parquet file."""
    rng = np.random.default_rng(0)
    beta = (rng.standard_normal(D) / D**0.5).astype("f4")
    X = np.memmap(folder / "X.f4", "f4", "w+", shape=(n_rows, D))
    y = np.memmap(folder / "y.i1", "i1", "w+", shape=n_rows)
    for start in range(0, n_rows, CHUNK):
        rows = slice(start, min(start + CHUNK, n_rows))
        X[rows] = rng.standard_normal((rows.stop - start, D), dtype="f4")
        y[rows] = rng.random(rows.stop - start) < 1 / (1 + np.exp(-X[rows] @ beta))
    if order != "shuffled":
        sorted_by = np.argsort(_key(order, X, y), kind="stable")
        X[:] = X[sorted_by]
        y[:] = y[sorted_by]
    X.flush(), y.flush()
    if parquet:
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = [*(f"x{i}" for i in range(D)), "y"]
        schema = pa.schema([(name, pa.float32()) for name in names[:-1]] + [("y", pa.int8())])
        path = folder / "rows.parquet"
        with pq.ParquetWriter(path, schema, compression="none") as writer:
            for start in range(0, n_rows, GROUP):
                rows = slice(start, min(start + GROUP, n_rows))
                columns = [*(X[rows, i] for i in range(D)), y[rows]]
                writer.write_table(pa.table(columns, schema=schema), row_group_size=GROUP)


def _key(order, X, y):
    """By which rows are sorted."""
    if order == "month":
        drift = (X[:, 0] + X[:, 1]) / 2**0.5  # a standard normal
        return np.searchsorted(norm.ppf(np.arange(1, 12) / 12), drift)
    return y if order == "outcome" else X[:, 0]


def newton(folder, n_rows):
    """Mode of all rows, and standard deviations by the curvature there."""
    X, y = arrays_of(folder, n_rows)
    beta = np.zeros(D)
    for _ in range(7):
        hessian = np.eye(D)
        slope = -beta
        for start in range(0, n_rows, CHUNK):
            rows = slice(start, start + CHUNK)
            x = X[rows].astype(float)
            p = 1 / (1 + np.exp(-x @ beta))
            hessian += (x * (p * (1 - p))[:, None]).T @ x
            slope = slope + x.T @ (y[rows] - p)
        beta = beta + np.linalg.solve(hessian, slope)
    return beta, np.sqrt(np.diag(np.linalg.inv(hessian)))


def arrays_of(folder, n_rows):
    X = np.memmap(folder / "X.f4", "f4", "r", shape=(n_rows, D))
    return X, np.memmap(folder / "y.i1", "i1", "r", shape=n_rows)


def run(source, folder, n_rows, pool, checks):
    """One source in this process."""
    X, y = arrays_of(folder, n_rows)
    if source == "parquet":
        columns = {"X": [f"x{i}" for i in range(D)], "y": "y"}
        data = ParquetLoader(folder / "rows.parquet", columns)
    else:
        data = {"X": X, "y": y} if source == "memmap" else ArrayLoader({"X": X, "y": y})
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pymc.sghmc").addHandler(handler)
    with pm.Model():
        beta = pm.Normal("beta", 0, 1, shape=D)
        logit = pm.Data("X", X[:10]) @ beta
        pm.Bernoulli("likelihood", logit_p=logit, observed=pm.Data("y", y[:10]))
        before = private_mb()
        began, cpu = time.perf_counter(), time.process_time()
        step, peak = peak_of(lambda: SGHMC(data=data, pool=pool))
        row = {
            "setup_s": time.perf_counter() - began,
            "setup_cpu_s": time.process_time() - cpu,
            "private_mb": peak - before,
        }
        began = time.perf_counter()
        idata = pm.sample(chains=4, cores=2, step=step, random_seed=1, progressbar=False)
        row["sampling_s"] = time.perf_counter() - began
    exact, sds = newton(folder, n_rows)
    draws = idata.posterior["beta"].values.reshape(-1, D)
    ess = az.ess(idata)["beta"].values
    row |= {
        "ess_per_s": ess.min() / row["sampling_s"],
        "mean_error": np.abs((draws.mean(axis=0) - exact) / sds).max(),
        "mean_mc": 1 / np.sqrt(ess.min()),
        "sd_error": np.abs(draws.std(axis=0) / sds - 1).max(),
        "sd_mc": 1 / np.sqrt(2 * ess.min()),
        "r_hat": float(az.rhat(idata)["beta"].max()),
        "log": [line for line in lines if "pool" in line or "order" in line or "loader" in line],
    }
    if checks:
        row |= measured("check", lambda: check_bias(idata, step, n_draws=40))[0]
        seconds, result = measured("loo", lambda: loo(idata, step))
        row |= seconds | {"loo_error": float(result["subsampling_se"])}
    return row


def measured(name, block):
    """Seconds and memory of a call, and what it returns."""
    before, began = private_mb(), time.perf_counter()
    result, peak = peak_of(block)
    found = {f"{name}_s": time.perf_counter() - began, f"{name}_mb": peak - before}
    return found, result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--pool", default="auto")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a source, in this process
    options = parser.parse_args()
    n_rows = int(options.rows)
    pools = {"auto": "auto", "None": None}
    pool = pools[options.pool] if options.pool in pools else int(options.pool)
    if options.one:
        report.print_json(run(options.one, options.folder, n_rows, pool, options.checks))
        return
    machine, rows = report.machine(), {}
    for order in options.orders:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write(Path(folder), n_rows, order, "parquet" in options.sources)
            for source in options.sources:
                command = [sys.executable, __file__, "--one", source, "--folder", folder]
                command += ["--rows", str(n_rows), "--pool", options.pool]
                command += ["--checks"] * options.checks
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                name = f"{source}, {order}"
                rows[name] = json.loads(done.stdout.splitlines()[-1])
                report.progress(name, rows[name])
    result = {"benchmark": "sources", "n_rows": n_rows, "pool": options.pool, "rows": rows}
    result |= report.closing(machine, *PACKAGES)
    report.print_json(result)
    if options.markdown:
        names = ["setup_s", "setup_cpu_s", "private_mb", "ess_per_s"]
        names += ["mean_error", "mean_mc", "sd_error", "sd_mc"]
        if options.checks:
            names += ["check_s", "check_mb", "loo_s", "loo_mb", "loo_error"]
        cells = [[way, *(row.get(name) for name in names)] for way, row in rows.items()]
        print(report.markdown_table(["", *names], cells))
        print(report.note(result))


if __name__ == "__main__":
    main()
