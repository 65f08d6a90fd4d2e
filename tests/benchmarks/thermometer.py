"""Whether the reported temperature predicts the measured variances, in good runs and in bad ones.

    python tests/benchmarks/thermometer.py [--name wells htru2] [--sampler SGHMC SGLD]
        [--variant untouched rate_x10 ...] [--draws 0] [--seed 1] [--cores 2] [--markdown]

Runs both samplers on the reference posteriors, untouched and spoiled on purpose: ten times the
learning rate that the untouched run chose, plain minibatches, plain ones whose noise nobody takes
out (at the untouched run's learning rate and friction), batches of 10, the paper's integrator, and
several of these at once. Given learning rates come with ``preconditioner="dense"``, the coordinates
in which the untouched run chose them.

Prints one line of JSON and with ``--markdown`` a table; each row goes to standard error as soon as
it is there. "Ratio" is the mean over the unknowns of the draws' variance by the reference's, on the
unconstrained scale; "trace" is tr(P⁻¹Σ)/d, of the reference's covariance P and the draws' Σ, which
is what the configurational temperature T estimates where the posterior is a Gaussian; both are the
same where all directions are heated alike. Errors of ratio/T are Monte Carlo, of the
difference of both series draw by draw, and the reference's own, (2/N Σ_ij ρ_ij²)^½/d for N effective
draws and the correlations ρ of our draws. The verdict is "holds" where ratio/T is within 5 % and
four of both errors of 1, and "vague" if these errors are above 2.5 %; else "by trace" where that
quotient is, "off" where it isn't either, and "not mixed" where R-hat is above 1.05, for chains that
disagree have no variance to compare. A run that stops says so: "stopped". Warned is whether the end
of the run warned of the temperature, and missed a warning that wasn't where |T − 1| > .1.
"""

# ruff: noqa: I001  (untouched sets the environment before NumPy is imported)
import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings

from untouched import data_folder, logged_warnings, over_unknowns, rounded, scalar, unconstrained

import arviz as az
import numpy as np
import pymc as pm
from model_collection import models_of
from model_collection import real as references

import pymc_sghmc

from pymc_sghmc.diagnostics import configurational_temperature

CHAINS, TUNE = 4, 1000
TOLERANCE, ERRORS, VAGUE, MAX_R_HAT = 0.05, 4, 0.025, 1.05
NAMES = [
    "wells",
    "power_plant",
    "htru2",
    "california_housing",
    "bike_hour",
    "a9a",
    "logearn_height",
]


def bad(rate=1, **settings):
    """Settings from those of the untouched run: ``rate`` times its learning rate, and others."""
    return lambda rate_of, friction_of: {
        "learning_rate": rate * rate_of,
        "preconditioner": "dense",
        **settings,
    }


def uncorrected(rate_of, friction_of):
    return bad(gradient="plain", noise_estimate=None, friction=friction_of)(rate_of, friction_of)


def automatic(**settings):
    return lambda rate_of, friction_of: settings


VARIANTS = {
    "untouched": automatic(),
    "rate_x10": bad(10),
    "plain": automatic(gradient="plain"),
    "plain_rate_x1": bad(gradient="plain"),
    "plain_rate_x10": bad(10, gradient="plain"),
    "batch_10": automatic(batch_size=10),
    "batch_10_rate_x1": bad(batch_size=10),
    "batch_10_rate_x10": bad(10, batch_size=10),
    "batch_10_plain": automatic(batch_size=10, gradient="plain"),
    "uncorrected": uncorrected,
    "euler": automatic(integrator="euler"),
    "euler_rate_x10": bad(10, integrator="euler"),
}
SGHMC_ONLY = "uncorrected", "euler", "euler_rate_x10"


def run(reference, sampler, settings, **sample):
    """One row: sample the reference's model and compare, or say how the run ended."""
    row, start, idata = {"settings": settings}, time.perf_counter(), None
    with logged_warnings() as texts, reference.model:
        try:
            step = getattr(pymc_sghmc, sampler)(**{"batch_size": 500, **settings})
            idata = pm.sample(step=step, chains=CHAINS, progressbar=False, **sample)
        except Exception as error:  # a run that ends with an error has said so
            row["stopped"] = f"{type(error).__name__}: {error}".splitlines()[0]
    row["seconds"] = round(time.perf_counter() - start, 1)
    row["warned"] = any("configurational temperature" in text for text in texts)
    if idata is not None:
        row |= measure(idata, reference)
        row["verdict"] = verdict(row)
        row["warning_missed"] = abs(row["temperature"][0] - 1) > 0.1 and not row["warned"]
        stops = [text for text in texts if " stopped: " in text]
        if stops or row["diverging"] or row["draws"] != [CHAINS, sample["draws"]]:
            row["stopped"] = (stops or ["cut short without a word"])[0]
    if "stopped" in row:
        row |= {"verdict": "stopped", "warning_missed": False}
    return row | {"messages": [text.splitlines()[0] for text in texts]}


def measure(idata, reference):
    x, _ = unconstrained(idata, reference.model)  # (chain, draw, d)
    d, stats = x.shape[-1], idata.sample_stats
    deviations = x - x.mean(axis=(0, 1))
    ratios = np.mean((deviations / reference.sd) ** 2, axis=-1)  # (chain, draw)
    flat = deviations.reshape(-1, d)
    trace = traces = np.nan
    if reference.covariance is not None:
        whitened = np.linalg.solve(np.linalg.cholesky(reference.covariance), flat.T)
        # E[P̂⁻¹] = P⁻¹ N/(N − d − 1) for N effective draws, 2 sd_error² = 1/N
        correction = 1 - (d + 1) * 2 * reference.sd_error**2
        traces = correction * np.mean(whitened**2, axis=0).reshape(ratios.shape)
        trace = traces.mean()
    series = stats["configurational_temperature"].values.reshape(ratios.shape)
    [temperature], [error] = configurational_temperature(idata)
    # 1/√(2 ESS) for a sd is sd_error, and so 4 sd_error² is 2/ESS
    correlations = np.corrcoef(flat.T)
    theirs = 2 * reference.sd_error * np.sqrt(np.mean(correlations**2))
    quotient, ours = ratios.mean() / temperature, scalar(az.mcse, ratios - series) / temperature
    trace_error = scalar(az.mcse, traces - series) / temperature if np.ndim(traces) else np.nan
    shift = np.abs(x.mean(axis=(0, 1)) - reference.mean) / reference.sd
    return {
        "draws": list(ratios.shape),
        "diverging": int(np.sum(stats["diverging"].values)),
        "finite": bool(np.isfinite(x).all()),
        "learning_rate": rounded(np.mean(stats["learning_rate"].values))[0],
        "friction": "friction" in stats and rounded(np.nanmean(stats["friction"].values))[0],
        "control_variates": float(np.mean(stats["control_variates"].values)),
        "ratio": rounded(ratios.mean(), scalar(az.mcse, ratios)),
        "temperature": rounded(temperature, error),
        "quotient": rounded(quotient, ours, theirs),
        "trace_quotient": rounded(trace / temperature, trace_error),
        "smallest_and_largest_ratio": rounded(
            *np.quantile(np.mean(deviations**2, axis=(0, 1)) / reference.sd**2, [0, 1])
        ),
        "largest_shift_in_sds": rounded(shift.max())[0],
        "max_r_hat": rounded(over_unknowns(az.rhat, x).max())[0],
        "min_ess": rounded(over_unknowns(az.ess, x).min())[0],
        "kurtosis": rounded(np.mean(np.mean(flat**4, axis=0) / np.mean(flat**2, axis=0) ** 2))[0],
    }


def verdict(row):
    if not (row["max_r_hat"] or np.inf) < MAX_R_HAT:
        return "not mixed"
    quotient, ours, theirs = row["quotient"]
    if ours is None:
        return "vague"
    error = np.hypot(ours, theirs)
    if abs(quotient - 1) < TOLERANCE + ERRORS * error:
        return "holds" if error < VAGUE else "vague"
    trace, ours = row["trace_quotient"]
    error = np.hypot(ours or 0, theirs)
    return "by trace" if trace and abs(trace - 1) < TOLERANCE + ERRORS * error else "off"


def markdown(result):
    titles = "T, ratio, trace/T, ratio/T, reference's error, max R-hat, min ESS, rate, friction, "
    titles = ["", *(titles + "warned, verdict").split(", ")]
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for name, row in result["runs"].items():
        if "ratio" not in row:
            cells = [name, row["stopped"], *[""] * (len(titles) - 3), row["verdict"]]
        else:
            cells = [
                name,
                pair(row["temperature"]),
                pair(row["ratio"]),
                pair(row["trace_quotient"]) if row["trace_quotient"][0] else "",
                pair(row["quotient"][:2]),
                f"{row['quotient'][2]:.3f}",
                f"{row['max_r_hat']}",
                f"{row['min_ess']:.0f}",
                f"{row['learning_rate']}",
                f"{row['friction'] or ''}",
                "yes" if row["warned"] else "**missed**" if row["warning_missed"] else "",
                row["verdict"] + (f": {row['stopped']}" if "stopped" in row else ""),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += [
        "",
        f"{CHAINS} chains, {TUNE:,} tuning draws, seed {result['seed']}; load {result['load'][0]} "
        f"before and {result['load'][1]} after. {versions}. {result['verdicts']}.",
    ]
    return "\n".join(lines)


def pair(numbers):
    return "{:.3f} ± {:.3f}".format(*(np.nan if x is None else x for x in numbers))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    everything = [loader.__name__ for loader in references.LARGE]
    parser.add_argument("--name", nargs="+", default=NAMES, choices=everything, metavar="NAME")
    parser.add_argument("--sampler", nargs="+", default=["SGHMC", "SGLD"], metavar="SAMPLER")
    parser.add_argument(
        "--variant", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="VARIANT"
    )
    parser.add_argument("--draws", type=int, default=0, help="0: more for fewer unknowns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of forks, of BLAS; PyMC's and ours about the run are logged
    runs, load = {}, [round(os.getloadavg()[0], 1)]
    variants = ["untouched", *(name for name in args.variant if name != "untouched")]
    for name in args.name:
        reference = models_of("real")[name].make(data_folder())
        draws = args.draws or int(np.clip(24_000 // reference.mean.size, 1500, 6000))
        sample = {"draws": draws, "tune": TUNE, "cores": args.cores, "random_seed": args.seed}
        for sampler in args.sampler:
            chosen = None, None
            for variant in variants:
                if sampler == "SGLD" and variant in SGHMC_ONLY:
                    continue
                row = run(reference, sampler, VARIANTS[variant](*chosen), **sample)
                if variant == "untouched":
                    chosen = row["learning_rate"], row["friction"]
                runs[f"{name}, {sampler}, {variant}"] = row
                line = {f"{name}, {sampler}, {variant}": row}
                print(json.dumps(line), file=sys.stderr, flush=True)
    verdicts = [row["verdict"] for row in runs.values()]
    packages = "numpy", "pymc", "pytensor", "arviz", "numba", "pymc-sghmc"
    result = {
        "benchmark": "thermometer",
        "seed": args.seed,
        "load": [*load, round(os.getloadavg()[0], 1)],
        "verdicts": {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)},
        "warnings_missed": sum(row.get("warning_missed", False) for row in runs.values()),
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
