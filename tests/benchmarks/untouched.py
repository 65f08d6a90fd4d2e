"""The samplers with untouched defaults on every reference posterior of 1,000 rows or more.

    python tests/benchmarks/untouched.py [--sampler SGHMC] [--name wells htru2] [--markdown]
        [--seed 1] [--draws 1000] [--tune 1000] [--cores 2] [--set learning_rate=1e-4 ...]

Runs ``pm.sample(step=SGHMC(batch_size=500))`` with four chains from PyMC's own starting points and
holds the draws, on the unconstrained scale, against the reference's means and standard deviations.
``--set`` gives the sampler further arguments, Python literals or bare words; a table made with it
says so.

Prints one line of JSON and with ``--markdown`` a table; each row goes to standard error as soon as
it is there. Errors are the largest over the unknowns, those of means in posterior sds and those of
sds relative to them, each with that unknown's own standard error: Monte Carlo of the run and error
of the reference. For an sd it is 1/√(2 ESS), ESS being that of the squared deviations. "Within"
means below .1 sd or 5 % and four standard errors, for every unknown; wide errors excuse much, so
read R-hat and the effective size beside it. The ratio of variances is the mean over the unknowns of
draws' by reference's; for a right thermometer, and all directions heated alike, it is the
configurational temperature. Seconds include compilation, PyTensor's caches on disk as found.
"""

import os

# Chains run in processes of their own: BLAS threads in each would fight for the same cores.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import ast
import importlib.metadata
import json
import platform
import sys
import time
import warnings

from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import arviz as az
    import pymc as pm

    from data_folder import data_folder
    from logs import logged_warnings
    from model_collection import models_of
    from model_collection import real as references

    import pymc_sghmc

    from pymc_sghmc.diagnostics import configurational_temperature

SAMPLERS = "SGHMC", "SGLD"
CHAINS = 4
BATCH = 500
MEAN_TOLERANCE, SD_TOLERANCE = 0.1, 0.05  # in posterior sds; relative
ERRORS = 4  # and so many standard errors
SETTINGS = "learning_rate", "friction", "control_variates"  # where the statistics have them


def run(name, sampler, settings, **sample):
    """One row: sample the named reference's model and measure, or say what went wrong."""
    reference = models_of("real")[name].make(data_folder())
    row = {"N": int(reference.model["y"].shape[0].eval()), "d": reference.mean.size}
    start = time.perf_counter()
    with logged_warnings() as texts, reference.model:
        try:
            step = getattr(pymc_sghmc, sampler)(**settings)
            row["construction_seconds"] = round(time.perf_counter() - start, 1)
            start = time.perf_counter()
            idata = pm.sample(step=step, chains=CHAINS, progressbar=False, **sample)
            row["sample_seconds"] = round(time.perf_counter() - start, 1)
        except Exception as error:  # a sampler that gives up is a row of its own
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    if "failed" not in row:
        row |= measure(idata, reference)
    return row | {"warnings": texts}


def measure(idata, reference):
    draws, names = unconstrained(idata, reference.model)  # (chain, draw, d)
    true_sd = reference.sd
    mean = draws.mean(axis=(0, 1))
    squares = (draws - mean) ** 2
    mean_errors = np.abs(mean - reference.mean) / true_sd
    mean_mc = np.hypot(over_unknowns(az.mcse, draws), reference.error) / true_sd
    sd_errors = np.sqrt(squares.mean(axis=(0, 1))) / true_sd - 1
    sd_mc = np.hypot((2 * over_unknowns(az.ess, squares)) ** -0.5, reference.sd_error)

    ratios = np.mean(squares / true_sd**2, axis=-1)  # (chain, draw)
    stats = idata.sample_stats
    thermometer = stats["configurational_temperature"].values.reshape(ratios.shape)
    temperature, error = (x[0] if x.size else np.nan for x in configurational_temperature(idata))
    return {
        "draws": list(ratios.shape),
        "mean": worst(names, mean_errors, mean_mc, MEAN_TOLERANCE),
        "sd": worst(names, sd_errors, sd_mc, SD_TOLERANCE),
        "variance_ratio": rounded(ratios.mean(), scalar(az.mcse, ratios)),
        "temperature": rounded(temperature, error),
        "ratio_over_temperature": rounded(
            ratios.mean() / temperature,
            scalar(az.mcse, ratios - thermometer) / abs(temperature),
        ),
        "max_r_hat": rounded(over_unknowns(az.rhat, draws).max())[0],
        "min_ess_bulk": rounded(over_unknowns(az.ess, draws).min())[0],
        "diverging": int(np.sum(stats["diverging"].values)),
        "settings": {key: values_of(stats[key]) for key in SETTINGS if key in stats},
    }


def unconstrained(idata, model):
    """Draws in the order of the raveled value variables, of shape (chain, draw, d), and names."""
    parts, names = [], []
    for variable in model.free_RVs:
        x = idata.posterior[variable.name].transpose("chain", "draw", ...).values
        names += [
            "".join([variable.name, *(f"[{i}]" for i in index)])
            for index in np.ndindex(x.shape[2:])
        ]
        x = x.reshape(*x.shape[:2], -1)
        if variable.name == "sigma":
            x, names[-1] = np.log(x), "log sigma"
        parts.append(x)
    return np.concatenate(parts, axis=-1), names


def worst(names, errors, mc, tolerance):
    """The largest error and whose, its standard error, and how many unknowns aren't within."""
    i = int(np.argmax(np.abs(errors)))  # the first NaN, if there is one
    outside = int(np.sum(~(np.abs(errors) < tolerance + ERRORS * mc)))
    error, its_mc, largest = rounded(errors[i], mc[i], mc.max())
    return {
        "error": error,
        "mc": its_mc,
        "of": names[i],
        "largest_mc": largest,
        "outside": outside,
        "within": outside == 0,
    }


def values_of(stat):
    """One value, or the smallest and the largest; words as they are."""
    values = np.unique(np.asarray(stat))
    if values.dtype.kind in "fiu":
        return rounded(*values[[0, -1]]) if len(values) > 1 else rounded(values[0])[0]
    values = [x if isinstance(x, bool) else str(x) for x in values.tolist()]
    return values if len(values) > 1 else values[0]


def over_unknowns(statistic, x):
    return np.array([scalar(statistic, x[..., i]) for i in range(x.shape[-1])])


def scalar(statistic, x):
    """ArviZ 0.23 gives a number, ArviZ 1 an array."""
    return float(np.squeeze(statistic(np.ascontiguousarray(x))))


def rounded(*values):
    """To four digits; None for what JSON has no word for."""
    return [float(f"{x:.4g}") if np.isfinite(x) else None for x in values]


def markdown(result):
    titles = "N, d, seconds, largest mean error / sd, within, largest sd error, within, "
    titles += "ratio of variances, T_conf, ratio / T_conf, max R-hat, min ESS, settings, warnings"
    titles = ["", *titles.split(", ")]
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    notes = {}  # text: its number
    for name, row in result["runs"].items():
        cells = [name, f"{row['N']:,}", str(row["d"])]
        marks = " ".join(str(notes.setdefault(text, len(notes) + 1)) for text in row["warnings"])
        if "failed" in row:
            cells += [f"failed: {row['failed']}", *[""] * (len(titles) - 5), marks]
        else:
            mean, sd = row["mean"], row["sd"]
            cells += [
                f"{row['construction_seconds']} + {row['sample_seconds']}",
                f"{pair([mean['error'], mean['mc']])} {mean['of']}",
                "yes" if mean["within"] else f"**no**, {mean['outside']}",
                f"{pair([sd['error'], sd['mc']], '+')} {sd['of']}",
                "yes" if sd["within"] else f"**no**, {sd['outside']}",
                pair(row["variance_ratio"]),
                pair(row["temperature"]),
                pair(row["ratio_over_temperature"]),
                str(row["max_r_hat"]),
                f"{row['min_ess_bulk'] or 0:.0f}",
                ", ".join(f"{key} {value}" for key, value in row["settings"].items()),
                marks,
            ]
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    arguments = ", ".join(f"{key}={value}" for key, value in result["arguments"].items())
    run = result["run"]
    lines += [
        "",
        f"{result['sampler']}({arguments}), {CHAINS} chains of {run['tune']:,} + {run['draws']:,} "
        f"draws, seed {run['random_seed']}, cores={run['cores']} of {result['processors']}, load "
        f"{result['load'][0]} before and {result['load'][1]} after. {versions}. Seconds: the step's "
        "construction + pm.sample. Behind “no”: the number of unknowns outside.",
        "",
        *(f"{number}. {' '.join(text.split())}" for text, number in notes.items()),
    ]
    return "\n".join(lines)


def pair(numbers, sign=""):
    value, error = (np.nan if x is None else x for x in numbers)
    return f"{value:{sign}.3f} ± {error:.3f}"


def setting(text):
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def main():
    names = [loader.__name__ for loader in references.LARGE]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sampler", choices=SAMPLERS, default="SGHMC")
    parser.add_argument(
        "--name", nargs="+", default=names, choices=[*names, "nes2000"], metavar="NAME"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--tune", type=int, default=1000)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    parser.add_argument("--set", nargs="+", default=[], type=setting, metavar="KEY=VALUE")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of forks, of BLAS; PyMC's and ours about the run are logged
    arguments = {"batch_size": BATCH, **dict(args.set)}
    sample = dict(draws=args.draws, tune=args.tune, cores=args.cores, random_seed=args.seed)
    load, runs = [round(os.getloadavg()[0], 1)], {}
    for name in args.name:
        runs[name] = run(name, args.sampler, arguments, **sample)
        print(json.dumps({name: runs[name]}), file=sys.stderr, flush=True)
    packages = "numpy", "pymc", "pytensor", "arviz", "numba", "pymc-sghmc"
    result = {
        "benchmark": "untouched",
        "sampler": args.sampler,
        "arguments": arguments,
        "run": {"chains": CHAINS, **sample},
        "processors": len(os.sched_getaffinity(0)),
        "load": [*load, round(os.getloadavg()[0], 1)],
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
