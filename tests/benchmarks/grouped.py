"""Untouched SGHMC on grouped models, beside references by long NUTS runs.

python tests/benchmarks/grouped.py [--name NAME ...] [--way WAY ...] [--markdown]
python tests/benchmarks/grouped.py --references [--name NAME ...]

prints one line of JSON with, for each model and way: seconds of making the step and of ``pm.sample`` (four
chains of 1,000 + 1,000 draws), learning rate, mean λ, the largest R-hat and the least effective size over all unknowns, this per
second of a core while sampling over nutpie's, seconds from start to 400 effective draws of the least of them (set-up, all of
``pm.sample``'s time before the draws, as many draws as that takes) beside nutpie's on as many cores, and the largest errors of means, in standard deviations, and of standard
deviations, relative, over all unknowns that the reference has. ``--way ADVI`` is PyMC's ``pm.fit`` with 30,000 steps
on all data, and 4,000 draws from what it finds; ``integrated out`` gives the effects of groups to ``marginalize``. ``--references`` makes references: four chains by nutpie on one core, which wants an environment of its own,
in the non-centred form; means, standard deviations, the least effective size and seconds go to tests/model_collection/grouped_references.npz. Models of
MovieLens need the shared data.
"""

# ruff: noqa: I001  (untouched sets the environment before NumPy is imported)
import argparse
import time
import warnings

from untouched import over_unknowns

import numpy as np
import pymc as pm
import report

from model_collection import models_of
from model_collection.grouped import REFERENCES, UNITS

MODELS = models_of("grouped")

WAYS = {
    "centred": ("centred", {"batch_size": 500}),
    "non-centred": ("non-centred", {"batch_size": 500}),
    "auto": ("non-centred", {"batch_size": "auto"}),
    "as written": ("non-centred", {"batch_size": 500, "centring": None}),
    "integrated out": ("non-centred", {"batch_size": 500}),
    "integrated out, auto": ("non-centred", {"batch_size": "auto"}),
    "ADVI": ("non-centred", None),
}
CORES = 2
FIT = 30_000  # steps of ADVI


def run(name, way):
    """One row."""
    import arviz as az

    from pymc_sghmc import SGHMC
    from pymc_sghmc.hierarchy.centring import centring_of

    form, settings = WAYS[way]
    if settings is None:
        return fit(name, form)
    if way.startswith("integrated"):
        settings = settings | {"marginalize": UNITS[name]}
    with MODELS[name].make(form) as model:
        began = time.perf_counter()
        step = SGHMC(**settings)
        made = time.perf_counter()
        idata = pm.sample(
            1000, tune=1000, chains=4, cores=CORES, step=step, random_seed=1, progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip
        seconds = time.perf_counter() - made
    draws = {key: x.to_numpy().reshape(4, 1000, -1) for key, x in idata.posterior.items()}
    unknowns = np.concatenate([draws[rv.name] for rv in model.free_RVs], axis=-1)
    row = {
        "rows": step.tuner.gradient.data.rows or settings["batch_size"],
        "set-up": made - began,
        "sampling": seconds,
        "learning_rate": float(idata.sample_stats["learning_rate"].to_numpy().ravel()[-1]),
        "R-hat": float(over_unknowns(az.rhat, unknowns).max()),
        "least ESS": float(over_unknowns(az.ess, unknowns).min()),
    }
    centring = centring_of(step.tuner.gradient.density)
    if centring is not None:
        row["λ"] = float(np.concatenate(list(centring.by_name().values())).mean())
    with np.load(REFERENCES) as known:
        if (key := f"{name}: seconds, least ESS, draws") in known:
            elapsed, least, length = known[key]
            row["× nutpie"] = row["least ESS"] / (CORES * seconds) / (least / elapsed)
            row["to 400"] = made - began + seconds * (1 + min(1, 400 / row["least ESS"])) / 2
            row["nutpie to 400"] = elapsed / CORES * (1000 + length * 400 / least) / (1000 + length)
    return row | errors(name, draws)


def fit(name, form):
    """One row of ADVI."""
    with MODELS[name].make(form):
        began = time.perf_counter()
        found = pm.fit(FIT, method="advi", random_seed=1, progressbar=False)
        seconds = time.perf_counter() - began
        idata = found.sample(4000, random_seed=1)
    draws = {key: x.to_numpy().reshape(1, 4000, -1) for key, x in idata.posterior.items()}
    return {"sampling": seconds} | errors(name, draws)


def errors(name, draws):
    """Largest errors beside the reference."""
    with np.load(REFERENCES) as known:
        keys = [key for key in draws if f"{name}/{key}/mean" in known]
        pairs = [(draws[k], known[f"{name}/{k}/mean"], known[f"{name}/{k}/sd"]) for k in keys]
    if not pairs:
        return {}
    moving = [sd > 1e-6 for _, _, sd in pairs]  # the diagonal of a correlation matrix doesn't
    pairs = [(x[..., k], m[k], sd[k]) for (x, m, sd), k in zip(pairs, moving, strict=True)]
    means = np.concatenate([np.abs(x.mean(axis=(0, 1)) - m) / sd for x, m, sd in pairs])
    sds = np.concatenate([x.std(axis=(0, 1)) / sd - 1 for x, _, sd in pairs])
    return {
        "mean": means.max(), "mean, r.m.s.": np.sqrt(np.square(means).mean()),
        "sd": np.abs(sds).max(), "sd, mean": sds.mean(),
    }  # fmt: skip


def refer(names, draws, tune):
    """Write references by nutpie."""
    import arviz as az
    import nutpie

    known = dict(np.load(REFERENCES)) if REFERENCES.exists() else {}
    for name in names:
        compiled = nutpie.compile_pymc_model(MODELS[name].make("non-centred"))
        began = time.perf_counter()
        trace = nutpie.sample(
            compiled, draws=draws, tune=tune, chains=4, cores=1, seed=1, progress_bar=False
        )
        seconds, least = time.perf_counter() - began, np.inf
        for key, x in trace.posterior.items():
            x = x.to_numpy().reshape(4, draws, -1)
            known[f"{name}/{key}/mean"] = x.mean(axis=(0, 1)).astype(np.float32)
            known[f"{name}/{key}/sd"] = x.std(axis=(0, 1)).astype(np.float32)
            least = min(least, float(over_unknowns(az.ess, x).min()))
        known[f"{name}: seconds, least ESS, draws"] = np.array([seconds, least, draws])
        report.progress(name, {"seconds": seconds, "least ESS": least})
        np.savez_compressed(REFERENCES, **known)


def main():
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME")
    parser.add_argument("--way", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY")
    parser.add_argument("--references", action="store_true")
    parser.add_argument("--draws", type=int, default=2000, help="of a reference's chain")
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.references:
        return refer(args.name, args.draws, 1000)
    rows, machine = {}, report.machine()
    for name in args.name:
        for way in args.way:
            try:
                rows[f"{name}, {way}"] = run(name, way)
            except Exception as error:  # a model that can't be sampled is a result, too
                rows[f"{name}, {way}"] = {"error": f"{type(error).__name__}: {error}"[:200]}
            report.progress(f"{name}, {way}", rows[f"{name}, {way}"])
    packages = "numpy", "pymc", "pytensor", "numba", "arviz", "pymc-sghmc"
    report.print_json({"benchmark": "grouped", "rows": rows, **report.closing(machine, *packages)})
    if args.markdown:
        keys = "λ", "set-up", "sampling", "learning_rate", "R-hat", "least ESS", "× nutpie", "to 400", "nutpie to 400", "mean", "mean, r.m.s.", "sd", "sd, mean"  # fmt: skip
        table = [[name, *(row.get(key) for key in keys)] for name, row in rows.items()]
        print(report.markdown_table(["", *keys], table))
    return None


if __name__ == "__main__":
    main()
