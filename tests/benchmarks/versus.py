"""Error of means and sds against seconds, for what samples from minibatches and for full-data NUTS.

    taskset -c 0,1 python tests/benchmarks/versus.py --n 10000 --n 100000 --n 1000000 --markdown

Logistic regression of N rows on 50 predictors whose covariance has condition number 30, under
Normal(0, 1) priors; the rows are drawn from the model, in float64. Methods are in `peers.py`:
full-data NUTS of nutpie (from 0.16), ADVI of PyMC, HMCECS of NumPyro, SGLD and SGHMC of BlackJAX,
plain and with control variates, and this package's with its defaults. Each runs in a process of its
own, four chains on two cores. ``--only METHOD`` runs that one, ``--python METHOD=PATH`` gives it
another interpreter; both may be repeated. What is missing or refuses is named with what it said.

Settings are those documented. BlackJAX's are of its sampling book; where N is above the book's
60,000, SGLD's step is cut to 60,000/N of it and SGHMC's to the root. For "best step" it runs with
that and six others from the mode; the table keeps the run nearest the reference, which no user has,
and charges for that one only.

The reference is the Laplace approximation corrected by importance sampling: the Gaussian's moments
plus the weighted draws' differences from them, with antithetic draws. Standard errors from 20
groups of draws, and the effective size of the weights, stand in the JSON.

Prints one line of JSON and with ``--markdown`` a table. Seconds begin with the model and end with
the draws; setup is compilation and, for the peers, the mode; sampling includes tuning. PyTensor's
caches on disk are as found. ESS is the least bulk ESS of the 50 unknowns, its rate that after
tuning, and seconds to 400 effective draws are those before the first kept draw plus 400 at that
rate; for ADVI, whose draws are independent, all seconds. An ESS says nothing where the posterior is
wrong: read it beside the errors. Errors are the worst of the 50; of 400 independent draws they
would be some 0.13 sds, and sd ratios 0.92 to 1.08. Where nutpie is not done after ``--limit``
seconds it is extrapolated: measured seconds per gradient times the gradients that it takes on a
Gaussian with the same covariance, whose ESS stands in the table.
"""

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xarray as xr

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import arviz as az

from peers import BATCH, CHAINS, CORES, METHODS, UNKNOWNS, rows, versions

EVALUATIONS = 2_000_000_000  # of a row's likelihood, by the reference
GROUPS = 20
BLOCK, BLOCK_DRAWS = 20_000, 100  # rows and draws evaluated at once
EFFECTIVE = 400
REFERENCE_FIGURES = (
    "draws",
    "ess",
    "se_mean_in_sds",
    "se_sd_ratio",
    "laplace_mean_error_in_sds",
    "laplace_sd_ratio",
    "seconds",
)


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def mode_and_covariance(X, y):
    """Newton's method."""
    beta = np.zeros(UNKNOWNS)
    for _ in range(50):
        p = 1 / (1 + np.exp(-X @ beta))
        precision = (X * (p * (1 - p))[:, None]).T @ X + np.eye(UNKNOWNS)
        step = np.linalg.solve(precision, X.T @ (y - p) - beta)
        beta = beta + step
        if step @ precision @ step < 1e-16:
            return beta, np.linalg.inv(precision)
    raise RuntimeError("Newton's method did not converge")


def reference(n):
    """Means and sds: the Laplace approximation corrected by importance sampling."""
    X, y = rows(n)
    start = time.perf_counter()
    mode, covariance = mode_and_covariance(X, y)
    pairs = EVALUATIONS // n // 2
    z = np.random.default_rng(2).standard_normal((pairs, UNKNOWNS))
    z = np.stack([z, -z], 1).reshape(-1, UNKNOWNS)
    away = z @ np.linalg.cholesky(covariance).T
    sums = y @ X
    blocks = np.array_split(X, -(-n // BLOCK))

    def log_weights(part):
        beta = mode + part
        losses = sum(softplus(block @ beta.T).sum(0) for block in blocks)
        return beta @ sums - losses - 0.5 * (beta**2).sum(1)

    with ThreadPoolExecutor(CORES) as pool:
        parts = np.array_split(away, -(-len(away) // BLOCK_DRAWS))
        log_w = np.concatenate(list(pool.map(log_weights, parts)))
    log_w += 0.5 * (z**2).sum(1)
    w = np.exp(log_w - log_w.max())

    def moments(i):
        excess = w[i] / w[i].mean() - 1
        shift = excess @ away[i] / len(excess)
        variance = np.diag(covariance) + excess @ away[i] ** 2 / len(excess) - shift**2
        return mode + shift, variance**0.5

    mean, sd = moments(slice(None))
    groups = [moments(i) for i in np.array_split(np.arange(len(w)), GROUPS)]
    means, sds = (np.array(m) for m in zip(*groups, strict=True))
    return {
        "mode": mode,
        "covariance": covariance,
        "mean": mean,
        "sd": sd,
        "draws": len(w),
        "ess": w.sum() ** 2 / (w**2).sum(),
        "se_mean_in_sds": (means.std(0, ddof=1) / sd).max() / GROUPS**0.5,
        "se_sd_ratio": (sds.std(0, ddof=1) / sd).max() / GROUPS**0.5,
        "laplace_mean_error_in_sds": np.abs((mode - mean) / sd).max(),
        "laplace_sd_ratio": [f(np.diag(covariance) ** 0.5 / sd) for f in (min, max)],
        "seconds": time.perf_counter() - start,
    }


def diagnostic(function, draws):
    data = xr.DataArray(draws, dims=("chain", "draw"), name="x")
    result = function(data)
    return float(result["x"] if isinstance(result, xr.Dataset) else result)


def figure(x, digits=3):
    return float(f"{x:.{digits}g}") if np.isfinite(x) else None


def measure(name, n, python, path, truth, folder, args):
    """Run one method in a process; return the row of the table."""
    out = folder / f"{name}-{n}.json"
    command = [python, Path(__file__).with_name("peers.py"), name, "--n", n, "--out", out]
    command += ["--reference", path, "--limit", args.limit]
    command += ["--nutpie-draws", args.nutpie_draws]
    load = os.getloadavg()[0]
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=args.timeout,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {args.timeout:g} s"}
    except OSError as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    if not out.exists():
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": said[-1]}
    report = json.loads(out.read_text())
    row = {} if python == sys.executable else {"versions": report["versions"]}
    if "failed" in report:
        return {"failed": report["failed"], **row}
    draws = np.load(out.with_suffix(".npy"))
    extrapolated = report.get("extrapolated", False)
    seconds = report["setup"] + report["sampling"]
    row |= {
        "setup_seconds": figure(report["setup"]),
        "sampling_seconds": figure(report["sampling"]),
        "seconds": figure(seconds),
        "min_ess_bulk": None,
        "min_ess_bulk_per_second": None,
        "seconds_to_400": figure(seconds),
        "max_mean_error_in_sds": None,
        "sd_ratio": None,
        "draws": list(draws.shape[:2]),
        "extrapolated": extrapolated,
        "load": round(load, 1),
    }
    for key in "seconds_per_gradient", "measured_seconds", "measured_gradients", "step_size":
        if key in report:
            row[key] = figure(report[key])
    if not np.isfinite(draws).all():
        return {"failed": "draws that are not finite", **row}
    if not extrapolated:
        flat = draws.reshape(-1, UNKNOWNS)
        ratio = flat.std(0) / truth["sd"]
        row["max_mean_error_in_sds"] = figure(
            np.abs((flat.mean(0) - truth["mean"]) / truth["sd"]).max()
        )
        row["sd_ratio"] = [figure(ratio.min()), figure(ratio.max())]
    if not report.get("independent"):
        columns = np.moveaxis(draws, -1, 0)
        ess = min(diagnostic(az.ess, column) for column in columns)
        rate = ess / report["drawing"]
        row["min_ess_bulk"] = round(ess)
        row["min_ess_bulk_per_second"] = figure(rate)
        row["seconds_to_400"] = figure(seconds - report["drawing"] + EFFECTIVE / rate)
        row["max_r_hat"] = figure(max(diagnostic(az.rhat, column) for column in columns), 4)
    return row


def markdown(result):
    titles = [
        "",
        "setup, s",
        "sampling",
        "in all",
        "draws",
        "min bulk ESS",
        "per second",
        "s to 400 effective",
        "largest mean error, sds",
        "sd ratios",
    ]
    lines = []
    for n, block in result["rows"].items():
        lines += [f"N = {int(n):,}", ""]
        lines += ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
        lines += [table_row(METHODS[name][0], row, titles) for name, row in block["runs"].items()]
        true = block["reference"]
        lines += [
            "",
            f"Reference: {true['draws']:,} weighted draws, effective {true['ess']:,.0f}; standard "
            f"error of means at most {true['se_mean_in_sds']:.2g} sds, of sds at most "
            f"{100 * true['se_sd_ratio']:.2g} %. The Laplace approximation itself is "
            f"{true['laplace_mean_error_in_sds']:.2g} sds off, its sds "
            "{:.3f} to {:.3f} times those.".format(*true["laplace_sd_ratio"]),
            "",
        ]
    listed = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += [
        "¹ The one of seven steps nearest the reference, begun at the mode; seconds of it alone.",
        "≈ Extrapolated.",
        "",
        f"{listed}. {CHAINS} chains, cores={CORES}, on {result['processors']} processors; load "
        f"{result['load'][0]} at the start, {result['load'][1]} at the end.",
    ]
    return "\n".join(lines)


def table_row(title, row, titles):
    if "failed" in row:
        return f"| {title} | failed: {row['failed']}" + " |" * (len(titles) - 1)
    about = "≈ " if row["extrapolated"] else ""
    seconds = ("", "setup_seconds"), (about, "sampling_seconds"), (about, "seconds")
    keys = "min_ess_bulk", "min_ess_bulk_per_second", "seconds_to_400"
    cells = [
        title,
        *(f"{mark}{row[key]:,.5g}" for mark, key in seconds),
        "{} × {:,}".format(*row["draws"]),
        *("–" if row[key] is None else f"{about}{row[key]:,.5g}" for key in keys),
        "–" if row["sd_ratio"] is None else f"{row['max_mean_error_in_sds']:.2f}",
        "–" if row["sd_ratio"] is None else "{:.2f} to {:.2f}".format(*row["sd_ratio"]),
    ]
    return "| " + " | ".join(cells) + " |"


def plain(value):
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value if isinstance(value, int) else figure(float(value), 4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, action="append", help="rows, may be repeated")
    parser.add_argument("--only", action="append", choices=METHODS, metavar="METHOD")
    parser.add_argument("--python", action="append", default=[], metavar="METHOD=PATH")
    parser.add_argument("--nutpie-draws", type=int, default=500, help="per chain")
    parser.add_argument("--limit", type=float, default=120, help="seconds given to nutpie")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds given to a method")
    parser.add_argument("--reference", type=Path, help="folder that keeps references")
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    args = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in args.python)
    if unknown := pythons.keys() - METHODS.keys():
        parser.error(f"no such method: {', '.join(unknown)}; there are {', '.join(METHODS)}")
    load = [round(os.getloadavg()[0], 1)]
    blocks = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.reference or Path(temporary)
        for n in args.n or [10_000]:
            print(f"N = {n:,}: reference …", file=sys.stderr, flush=True)
            if not (path := folder / f"{n}.npz").exists():
                np.savez(path, **reference(n))
            with np.load(path) as file:
                truth = {key: value.tolist() for key, value in file.items()}
            runs = {}
            for name in METHODS:
                if name in (args.only or METHODS):
                    print(f"N = {n:,}: {METHODS[name][0]} …", file=sys.stderr, flush=True)
                    python = pythons.get(name, sys.executable)
                    runs[name] = measure(name, n, python, path, truth, Path(temporary), args)
            blocks[n] = {
                "runs": runs,
                "reference": {k: plain(v) for k, v in truth.items() if k in REFERENCE_FIGURES},
            }
    result = {
        "benchmark": "versus",
        "unknowns": UNKNOWNS,
        "batch": BATCH,
        "chains": CHAINS,
        "cores": CORES,
        "processors": len(os.sched_getaffinity(0)),
        "load": [*load, round(os.getloadavg()[0], 1)],
        "rows": blocks,
        "versions": versions(),
    }
    print(json.dumps(result))
    if args.markdown:
        print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
