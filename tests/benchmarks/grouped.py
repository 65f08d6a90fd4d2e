"""Untouched SGHMC on grouped models, beside references by long NUTS runs.

python tests/benchmarks/grouped.py [--name NAME ...] [--way WAY ...] [--markdown]
python tests/benchmarks/grouped.py --references [--name NAME ...]

prints one line of JSON with, for each model and way: seconds of making the step and of ``pm.sample`` (four
chains of 1,000 + 1,000 draws), learning rate, mean λ, the largest R-hat and the least effective size over all unknowns, and
the largest errors of means, in standard deviations, and of standard deviations, relative, over all unknowns
that the reference has. ``--references`` makes these: four chains by nutpie, which wants an environment of its own,
in the non-centred form; means, standard deviations, the least effective size and seconds go to grouped_references.npz. Models of
MovieLens need the shared data.
"""

# ruff: noqa: I001  (untouched sets the environment before NumPy is imported)
import argparse
import time
import warnings

from pathlib import Path

from untouched import data_folder, over_unknowns

import numpy as np
import pymc as pm
import report

REFERENCES = Path(__file__).with_name("grouped_references.npz")
WAYS = {
    "centred": ("centred", {"batch_size": 500}),
    "non-centred": ("non-centred", {"batch_size": 500}),
    "auto": ("non-centred", {"batch_size": "auto"}),
    "as written": ("non-centred", {"batch_size": 500, "centring": None}),
}


def effects(name, raw, tau, shape, form):
    """An effect u, and in the non-centred form u = τz."""
    if form == "centred":
        return pm.Normal(name, 0, tau, shape=shape)
    return pm.Deterministic(name, pm.Normal(raw, 0, 1, shape=shape) * tau)


def logistic(form, groups, rows, tau):
    """Random intercepts."""
    rng = np.random.default_rng(0)
    group, u = np.repeat(np.arange(groups), rows), rng.normal(0, tau, groups)
    x = rng.normal(size=(groups * rows, 3))
    p = 1 / (1 + np.exp(-(x @ [0.5, -0.3, 0.8] + 0.3 + u[group])))
    y = (rng.random(groups * rows) < p).astype(int)
    with pm.Model() as model:
        tau, b, a = pm.HalfNormal("tau", 1), pm.Normal("b", 0, 1, shape=3), pm.Normal("a", 0, 1)
        u = effects("u", "z", tau, groups, form)
        pm.Bernoulli("y", logit_p=a + x @ b + u[group], observed=y)
    return model


def nested(form):
    """Counts at 300 sites in 30 regions."""
    rng = np.random.default_rng(1)
    regions, sites, rows = 30, 300, 20
    region, site = (
        np.repeat(np.arange(regions), sites // regions),
        np.repeat(np.arange(sites), rows),
    )
    r = rng.normal(0, 0.5, regions)
    s = r[region] + rng.normal(0, 0.4, sites)
    x = rng.normal(size=sites * rows)
    y = rng.poisson(np.exp(0.2 + 0.3 * x + s[site]))
    with pm.Model() as model:
        tau_r, tau_s = pm.HalfNormal("tau_r", 1), pm.HalfNormal("tau_s", 1)
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 1)
        if form == "centred":
            s = pm.Normal("s", pm.Normal("r", 0, tau_r, shape=regions)[region], tau_s, shape=sites)
        else:
            zr, zs = pm.Normal("zr", 0, 1, shape=regions), pm.Normal("zs", 0, 1, shape=sites)
            s = (zr * tau_r)[region] + zs * tau_s
        pm.Poisson("y", pm.math.exp(a + b * x + s[site]), observed=y)
    return model


def movielens(form, ratings):
    """Users crossed with films."""
    with np.load(data_folder() / "movielens" / "ml100k.npz") as data:
        rows = np.random.default_rng(0).permutation(100_000)[:ratings]
        ids = [np.unique(data[key][rows], return_inverse=True)[1] for key in ("user", "item")]
        y = data["rating"][rows].astype(float)
    with pm.Model() as model:
        a, sigma = pm.Normal("a", 3.5, 1), pm.HalfNormal("sigma", 2)
        for i, k in zip(ids, "ui", strict=True):
            tau = pm.HalfNormal(f"tau_{k}", 1)
            a = a + effects(k, f"z{k}", tau, int(i.max() + 1), form)[i]
        pm.Normal("y", a, sigma, observed=y)
    return model


MODELS = {
    "logistic 200 × 50": lambda form: logistic(form, 200, 50, 0.7),
    "logistic 200 × 20": lambda form: logistic(form, 200, 20, 0.7),
    "logistic 200 × 5": lambda form: logistic(form, 200, 5, 0.7),
    "logistic 200 × 2": lambda form: logistic(form, 200, 2, 0.8),
    "logistic 12 × 40": lambda form: logistic(form, 12, 40, 0.7),
    "logistic 12 × 4,000": lambda form: logistic(form, 12, 4000, 0.05),
    "logistic 2,000 × 20": lambda form: logistic(form, 2000, 20, 0.7),
    "Poisson, 300 in 30": nested,
    "MovieLens, 20,000": lambda form: movielens(form, 20_000),
    "MovieLens, 100,000": lambda form: movielens(form, 100_000),
}


def run(name, way):
    """One row."""
    import arviz as az

    from pymc_sghmc import SGHMC

    form, settings = WAYS[way]
    with MODELS[name](form) as model:
        began = time.perf_counter()
        step = SGHMC(**settings)
        made = time.perf_counter()
        idata = pm.sample(
            1000, tune=1000, chains=4, cores=2, step=step, random_seed=1, progressbar=False,
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
    centring = step.tuner.gradient.density.centring
    if centring is not None:
        row["λ"] = float(centring.weights.mean())
    return row | errors(name, draws)


def errors(name, draws):
    """Largest errors beside the reference."""
    with np.load(REFERENCES) as known:
        keys = [key for key in draws if f"{name}/{key}/mean" in known]
        pairs = [(draws[k], known[f"{name}/{k}/mean"], known[f"{name}/{k}/sd"]) for k in keys]
    if not pairs:
        return {}
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
        compiled = nutpie.compile_pymc_model(MODELS[name]("non-centred"))
        began = time.perf_counter()
        trace = nutpie.sample(
            compiled, draws=draws, tune=tune, chains=4, cores=1, seed=1, progress_bar=False
        )
        seconds, least = time.perf_counter() - began, np.inf
        for key, x in trace.posterior.items():
            x = x.to_numpy().reshape(4, draws, -1)
            known[f"{name}/{key}/mean"] = x.mean(axis=(0, 1))
            known[f"{name}/{key}/sd"] = x.std(axis=(0, 1))
            least = min(least, float(over_unknowns(az.ess, x).min()))
        known[f"{name}: seconds, least ESS"] = np.array([seconds, least])
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
        keys = "λ", "set-up", "sampling", "learning_rate", "R-hat", "least ESS", "mean", "mean, r.m.s.", "sd", "sd, mean"  # fmt: skip
        table = [[name, *(row.get(key) for key in keys)] for name, row in rows.items()]
        print(report.markdown_table(["", *keys], table))
    return None


if __name__ == "__main__":
    main()
