"""QNHMC, PyMC's HMC and NUTS, and nutpie on twelve small posteriors of posteriordb.

    python tests/benchmarks/posteriordb_table.py [--seeds 1 2 3] [--name sblrc wells] [--markdown]
        [--sampler QNHMC "NUTS (PyMC)"] [--draws 1000] [--tune 1000]

Defaults throughout: ``pm.sample(step=QNHMC())``, the same with ``pm.HamiltonianMC()``,
``pm.sample()`` of NUTS with its diagonal mass matrix, and nutpie with a diagonal and a low-rank one,
which is named as failed where it isn't installed or doesn't fit PyMC. Four chains, one after the
other, of 1,000 draws after 1,000 for tuning; nutpie tunes as long as it thinks fit (400 or 800).

Prints one line of JSON, one row per posterior, sampler and seed, and with ``--markdown`` two tables:
the seeds' worst errors and median efficiencies, and QNHMC's efficiencies by those of NUTS. Errors
and effective sizes are the worst over the reference's parameters, on their scale. Errors of means
are in posterior sds; "right" means within .1 sd and 5 % of the sds, each with four standard errors
(Monte Carlo of the run and error of the reference) to spare, and R-hat below 1.01.

Gradients are the leapfrog steps that the statistics count. PyMC's HMC and NUTS compute one more per
draw, at its start, which QNHMC remembers; it isn't counted. Seconds are those of the steps
(``perf_counter_diff``, summed over chains), without compilation and what ``pm.sample`` does beside;
"after tuning" they leave tuning out. nutpie's are those of ``nutpie.sample``, which stores the draws
besides; the part after tuning is by its share of the gradients.
"""

import os

# One processor: BLAS threads would fight with other work on the machine.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import logging
import sys
import time
import warnings

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 at import.
    import arviz as az
    import pymc as pm
    import report

    from model_collection import models_of, posteriordb
    from model_collection.real import NUTS_EFFICIENCY
    from untouched import ERRORS, MEAN_TOLERANCE, SD_TOLERANCE, data_folder, over_unknowns

    from pymc_sghmc import QNHMC

CHAINS = 4
LARGEST_R_HAT = 1.01
PACKAGES = "numpy", "scipy", "pymc", "pytensor", "arviz", "numba", "nutpie", "pymc-sghmc"


class Run(NamedTuple):
    idata: Any
    gradients: int  # after tuning, all chains
    tuning_gradients: int
    seconds: float  # after tuning, all chains
    total_seconds: float  # with tuning, without compilation


def by_step(model, *, make_step=None, draws, tune, chains, seed):
    """``pm.sample`` with the step, or with PyMC's NUTS."""
    with model:
        step = {"nuts_sampler": "pymc"} if make_step is None else {"step": make_step()}
        idata = pm.sample(
            draws,
            tune=tune,
            chains=chains,
            cores=1,
            random_seed=seed,
            progressbar=False,
            discard_tuned_samples=False,
            compute_convergence_checks=False,
            **step,
        )
    kept, tuning = idata["sample_stats"], idata["warmup_sample_stats"]
    seconds, tuning_seconds = (float(x["perf_counter_diff"].sum()) for x in (kept, tuning))
    steps = (int(x["n_steps"].sum()) for x in (kept, tuning))
    return Run(idata, *steps, seconds, seconds + tuning_seconds)


def by_nutpie(model, *, low_rank, draws, tune, chains, seed, nutpie_tune=None):
    """Nutpie, with its own number of tuning draws unless ``nutpie_tune`` is one."""
    import nutpie

    settings = {"low_rank_modified_mass_matrix": True} if low_rank else {}
    compiled = nutpie.compile_pymc_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0.16 has another word for it
        start = time.perf_counter()
        idata = nutpie.sample(
            compiled,
            draws=draws,
            tune=nutpie_tune,
            chains=chains,
            cores=1,
            seed=seed,
            progress_bar=False,
            **settings,
        )
        total = time.perf_counter() - start
    kept, tuning = (int(idata[g]["n_steps"].sum()) for g in ("sample_stats", "warmup_sample_stats"))
    return Run(idata, kept, tuning, total * kept / (kept + tuning), total)


SAMPLERS = {
    "QNHMC": partial(by_step, make_step=QNHMC),
    "HMC (PyMC)": partial(by_step, make_step=pm.HamiltonianMC),
    "NUTS (PyMC)": by_step,
    "nutpie": partial(by_nutpie, low_rank=False),
    "nutpie, low rank": partial(by_nutpie, low_rank=True),
}


def attempt(sampler, model, **sample):
    """The run, or in words why there is none."""
    try:
        return sampler(model, **sample)
    except Exception as error:  # a tool that is missing, refuses or gives up is a row of its own
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def efficiency(run, draws):
    """Least effective sizes of ``draws``, (chain, draw, k), alone, by gradients and by seconds."""
    bulk = over_unknowns(az.ess, draws).min()
    tail = over_unknowns(partial(az.ess, method="tail", prob=(0.05, 0.95)), draws).min()
    if (np.ptp(draws, axis=1) == 0).any():  # ArviZ gives a chain that stands still all its draws
        bulk = tail = 0.0
    return {
        "draws": list(draws.shape[:2]),
        "min_bulk": bulk,
        "min_tail": tail,
        "bulk_per_gradient": bulk / run.gradients,
        "tail_per_gradient": tail / run.gradients,
        "bulk_per_second": bulk / run.seconds,
        "bulk_per_total_second": bulk / run.total_seconds,
        "gradients": run.gradients,
        "tuning_gradients": run.tuning_gradients,
        "divergences": int(run.idata["sample_stats"]["diverging"].sum()),
    }


def errors(draws, mean, sd, error, sd_error):
    """Errors against a reference, and which of the three conditions of "right" hold."""
    centre = draws.mean(axis=(0, 1))
    squares = (draws - centre) ** 2
    mean_errors = np.abs(centre - mean) / sd
    mean_mc = np.hypot(over_unknowns(az.mcse, draws), error) / sd
    ratios = np.sqrt(squares.mean(axis=(0, 1))) / sd
    sd_mc = np.hypot((2 * over_unknowns(az.ess, squares)) ** -0.5, sd_error)
    n = draws.shape[1] // 2
    chains = draws if len(draws) > 1 else np.concatenate([draws[:, :n], draws[:, n : 2 * n]])
    r_hat = over_unknowns(az.rhat, chains).max()
    return {
        "mean_error": mean_errors.max(),
        "sd_ratio": [ratios.min(), ratios.max()],
        "r_hat": r_hat,
        "means_right": bool((mean_errors < MEAN_TOLERANCE + ERRORS * mean_mc).all()),
        "sds_right": bool((np.abs(ratios - 1) < SD_TOLERANCE + ERRORS * sd_mc).all()),
        "r_hat_right": bool(r_hat < LARGEST_R_HAT),
    }


def is_right(row):
    return row["means_right"] and row["sds_right"] and row["r_hat_right"]


def measure(sampler, posterior, **sample):
    run = attempt(sampler, posterior.model, **sample)
    if not isinstance(run, Run):
        return run
    draws = posteriordb.draws_of(run.idata, posterior)
    # Effective draws of the reference's squares: posteriordb's are thinned to independence.
    n = 20_000 * NUTS_EFFICIENCY if posterior.name in posteriordb.CONDITION else 10_000
    moments = posterior.mean, posterior.sd, posterior.error, (2 * n) ** -0.5
    row = efficiency(run, draws) | errors(draws, *moments)
    return row | {"right": is_right(row)}


def combined(rows):
    """One row of several seeds': the worst errors and the median efficiencies."""
    done = [row for row in rows.values() if "failed" not in row]
    if not done:
        return next(iter(rows.values()))
    ratios = np.array([row["sd_ratio"] for row in done])
    return {
        "mean_error": max(row["mean_error"] for row in done),
        "sd_ratio": [ratios[:, 0].min(), ratios[:, 1].max()],
        "r_hat": max(row["r_hat"] for row in done),
        "right": sum(row["right"] for row in done),
        "seeds": len(rows),
        "divergences": sum(row["divergences"] for row in done),
        **{
            key: float(np.median([row[key] for row in done]))
            for key in (
                "bulk_per_gradient",
                "tail_per_gradient",
                "bulk_per_second",
                "bulk_per_total_second",
                "tuning_gradients",
                "gradients",
            )
        },
    }


def markdown(result):
    titles = ["", "worst mean error, sds", "sd ratios", "max R-hat", "bulk ESS per gradient"]
    titles += ["tail ESS per gradient", "bulk ESS/s after tuning", "bulk ESS/s with tuning"]
    titles += ["gradients after tuning", "in tuning", "divergences", "right"]
    lines, ratios = [], []
    for name, posterior in result["posteriors"].items():
        rows = {sampler: combined(seeds) for sampler, seeds in posterior["samplers"].items()}
        for sampler, row in rows.items():
            title = f"{name}, {sampler}"
            if "failed" in row:
                lines.append([title, f"failed: {row['failed']}", *[""] * (len(titles) - 2)])
                continue
            lines.append(
                [
                    title,
                    row["mean_error"],
                    "{:.3f} to {:.3f}".format(*row["sd_ratio"]),
                    f"{row['r_hat']:.3f}",
                    row["bulk_per_gradient"],
                    row["tail_per_gradient"],
                    row["bulk_per_second"],
                    row["bulk_per_total_second"],
                    int(row["gradients"]),
                    int(row["tuning_gradients"]),
                    row["divergences"],
                    f"{row['right']} of {row['seeds']}",
                ]
            )
        if all("seeds" in rows.get(sampler, {}) for sampler in ("QNHMC", "NUTS (PyMC)")):
            keys = "bulk_per_gradient", "tail_per_gradient", "bulk_per_second"
            ours, nuts = rows["QNHMC"], rows["NUTS (PyMC)"]
            ratios.append(
                [
                    name,
                    posterior["unknowns"],
                    posterior["condition"],
                    *(ours[key] / nuts[key] for key in (*keys, "bulk_per_total_second")),
                    *(f"{row['right']} of {row['seeds']}" for row in (ours, nuts)),
                ]
            )
    text = [report.markdown_table(titles, lines)]
    if ratios:
        numbers = np.array([row[3:7] for row in ratios])
        mean = np.exp(np.log(numbers).mean(axis=0))
        ratios.append(["geometric mean", "", "", *mean.tolist(), "", ""])
        titles = ["QNHMC by NUTS", "unknowns", "condition number", "bulk ESS per gradient"]
        titles += ["tail ESS per gradient", "bulk ESS/s after tuning", "bulk ESS/s with tuning"]
        text.append(report.markdown_table([*titles, "QNHMC right", "NUTS right"], ratios))
    text.append(
        f"{result['chains']} chains of {result['tune']:,} + {result['draws']:,} draws, seeds "
        f"{', '.join(map(str, result['seeds']))}: worst errors, median efficiencies. "
        f"{report.note(result)}"
    )
    return "\n\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--name",
        nargs="+",
        default=posteriordb.NAMES,
        choices=posteriordb.NAMES,
        metavar="NAME",
        help=", ".join(posteriordb.NAMES),
    )
    parser.add_argument(
        "--sampler", nargs="+", default=list(SAMPLERS), choices=SAMPLERS, metavar="SAMPLER"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--tune", type=int, default=1000, help="of PyMC's steps")
    parser.add_argument("--markdown", action="store_true", help="print tables as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the table says what the samplers' warnings would
    logging.getLogger("pymc").setLevel(logging.CRITICAL)
    machine, posteriors = report.machine(), {}
    for name in args.name:
        posterior = models_of("posteriordb")[name].make(data_folder())
        samplers = {sampler: {} for sampler in args.sampler}
        for seed in args.seeds:
            for sampler, rows in samplers.items():
                sample = dict(draws=args.draws, tune=args.tune, chains=CHAINS, seed=seed)
                rows[seed] = measure(SAMPLERS[sampler], posterior, **sample)
                report.progress(f"{name}, seed {seed}, {sampler}", rows[seed])
        posteriors[name] = {
            "unknowns": len(posterior.names),
            "condition": posterior.condition,
            "samplers": samplers,
        }
    result = {
        "benchmark": "posteriordb_table",
        "chains": CHAINS,
        "draws": args.draws,
        "tune": args.tune,
        "seeds": args.seeds,
        "posteriors": posteriors,
        **report.closing(machine, *PACKAGES),
    }
    report.print_json(result)
    if args.markdown:
        print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
