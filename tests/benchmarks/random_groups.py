"""SGHMC, untouched, on random models of grouped data, beside NUTS on the same models.

    python tests/benchmarks/random_groups.py --references FOLDER [--seeds 0 100] [--markdown]
        [--rows auto 500] [--limit 900]

A seed makes a model: a likelihood and its link; one to three levels, nested or crossed; groups of
equal sizes, of sizes by Zipf's law, or one with half of all rows; scales from 0.05 to 2; intercepts
alone or slopes, too, correlated or not; Normal or Student t effects; centred, non-centred, or as
Bambi writes it; 1,000 to 50,000 rows. References are by nutpie where it is installed and by PyMC's
NUTS otherwise: four chains on the same model, kept in FOLDER as means, standard deviations and
their errors. Each run is a process of its own, with four chains of 1,000 + 1,000 draws.

A run is right if every mean is within 0.1 sd of the reference's and every sd within 5 %, both with
4.5 Monte Carlo errors of run and reference beside that, R-hat is at most 1.01 and the least
effective size 400 or more. A run's errors are those of the reference at the run's effective size:
its own would excuse a chain that was far out for a few draws, as these make them large. Where the
fourth moment of an unknown may not exist, a sample's sd has no error that is known, and two runs of
NUTS differ by a factor of two in it: the range from the 5th to the 95th percentile takes its place.
These are effects with Student t laws, and the expected outcomes exp(η) that Bambi records.
A run is loud if SGHMC or PyMC warned. Models whose reference has itself an R-hat above 1.03 are
counted apart, as nobody knows their posterior. Prints a line for each run to standard error, and
one line of JSON.

    python tests/benchmarks/random_groups.py --references FOLDER --small

makes the references of ten small models, which the slow tests sample
(``tests/tuning/test_random_groups.py``), and puts them into one file beside the collection of
models.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import time
import warnings

from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import numpy as np

CHAINS = 4
CORES = 2
DRAWS = TUNE = 1000
REFERENCE_DRAWS = 2000
ERRORS = 4.5  # Monte Carlo errors that are granted
MEAN, SD, R_HAT, LEAST = 0.1, 0.05, 1.01, 400
CHAIN_AND_DRAW = ["chain", "draw"]
LOW, HIGH = 0.05, 0.95
REFERENCE_R_HAT = 1.03  # its errors are granted, too
SMALL = 3, 5, 9, 10, 21, 34, 35, 37, 53, 67  # seeds of models in the slow tests, ...
SMALL_MOST = 2000  # ... with at most so many rows
SMALL_REFERENCES = Path(__file__).parents[1] / "model_collection" / "random_groups_references.npz"
SUMMARISED = (
    "mean", "sd", "range", "mean error", "sd error", "range error", "R-hat", "ESS",
)  # fmt: skip
FAMILIES = (
    "normal", "Student t", "logit", "probit", "binomial", "Poisson", "negative binomial", "gamma",
)  # fmt: skip
BAMBI = {
    "normal": ("gaussian", None), "Student t": ("t", None), "logit": ("bernoulli", "logit"),
    "probit": ("bernoulli", "probit"), "Poisson": ("poisson", "log"),
    "negative binomial": ("negativebinomial", "log"), "gamma": ("gamma", "log"),
}  # fmt: skip


@dataclass
class Plan:
    """What a seed says about a model."""

    seed: int
    family: str
    rows: int
    predictors: int
    groups: list[int]  # by level, the level of most groups first
    nested: bool
    sizes: str
    scales: list[float]
    slopes: str  # "none", "independent", "correlated": at the first level
    effects: str
    form: str
    prior: str  # of scales


def plan(seed, most=50_000):
    """Draw a plan with at most ``most`` rows."""
    rng = np.random.default_rng([seed, 2026])
    rows = int(10 ** rng.uniform(3, np.log10(most)))
    levels = int(rng.choice([1, 2, 3], p=[0.5, 0.35, 0.15]))
    nested = bool(rng.random() < 0.5)
    groups = [int(10 ** rng.uniform(0.7, np.log10(min(rows / 4, 2000))))]
    for _ in range(levels - 1):
        most_here = max(groups[-1] / 3, 5) if nested else max(groups[0], 6)
        groups.append(int(rng.uniform(5, min(most_here, 500))))
    groups = sorted(groups, reverse=True)
    form = str(rng.choice(["centred", "non-centred", "Bambi"], p=[0.35, 0.4, 0.25]))
    families = [f for f in FAMILIES if form != "Bambi" or f in BAMBI]
    slopes = ["none", "independent", *(["correlated"] if form != "Bambi" else [])]
    return Plan(
        seed=seed,
        family=str(rng.choice(families)),
        rows=rows,
        predictors=int(rng.integers(1, 6)),
        groups=groups,
        nested=nested,
        sizes=str(rng.choice(["equal", "Zipf", "one huge"])),
        scales=[float(s) for s in 10 ** rng.uniform(np.log10(0.05), np.log10(2), levels + 1)],
        slopes=str(rng.choice(slopes, p=[0.6, 0.4] if form == "Bambi" else [0.55, 0.2, 0.25])),
        effects="Normal" if form == "Bambi" else str(rng.choice(["Normal", "Student t"])),
        form=form,
        prior=str(rng.choice(["half-normal", "exponential", "half-t"])),
    )


@dataclass
class Rows:
    """Data of a plan."""

    X: np.ndarray
    index: list[np.ndarray]  # by level, the group of each row
    y: np.ndarray
    trials: np.ndarray


def members(rng, items, groups, sizes):
    """Return the group of each of ``items``; each group has one at least where that is possible."""
    if sizes == "Zipf":
        shares = 1 / np.arange(1, groups + 1)
    elif sizes == "one huge":
        shares = np.r_[groups - 1 if groups > 1 else 1, np.ones(groups - 1)]
    else:
        shares = np.ones(groups)
    taken = rng.choice(groups, size=max(items - groups, 0), p=shares / shares.sum())
    return rng.permutation(np.r_[np.arange(min(groups, items)), taken])


def rows_of(plan):
    """Draw the data of a plan."""
    rng = np.random.default_rng([plan.seed, 1])
    X = rng.standard_normal((plan.rows, plan.predictors))
    index = [members(rng, plan.rows, plan.groups[0], plan.sizes)]
    for above, groups in zip(plan.groups, plan.groups[1:], strict=False):
        if plan.nested:
            index.append(members(rng, above, groups, plan.sizes)[index[-1]])
        else:
            index.append(members(rng, plan.rows, groups, plan.sizes))
    effect = rng.standard_normal if plan.effects == "Normal" else (lambda n: rng.standard_t(4, n))
    eta = rng.normal(0, 0.5) + X @ rng.normal(0, 0.3, plan.predictors)
    drawn = [scale * effect(g) for scale, g in zip(plan.scales, plan.groups, strict=False)]
    for i, u in zip(index, drawn, strict=True):
        eta = eta + u[i]
    if plan.slopes != "none":
        slope = plan.scales[-1] * effect(plan.groups[0])
        if plan.slopes == "correlated":
            slope = 0.6 * slope + 0.4 * plan.scales[-1] * drawn[0] / plan.scales[0]
        eta = eta + slope[index[0]] * X[:, 0]
    trials = rng.integers(1, 20, plan.rows)
    return Rows(X, index, outcomes(rng, plan.family, eta, trials), trials)


def outcomes(rng, family, eta, trials):
    """Draw outcomes for linear predictors."""
    n = len(eta)
    p = 1 / (1 + np.exp(-eta))
    mean = np.exp(np.clip(eta, -8, 6))
    draw = {
        "normal": lambda: eta + rng.normal(0, 0.8, n),
        "Student t": lambda: eta + 0.8 * rng.standard_t(4, n),
        "logit": lambda: rng.binomial(1, p),
        "probit": lambda: (eta + rng.standard_normal(n) > 0).astype(int),
        "binomial": lambda: rng.binomial(trials, p),
        "Poisson": lambda: rng.poisson(mean),
        "negative binomial": lambda: rng.negative_binomial(2, 2 / (2 + mean)),
        "gamma": lambda: rng.gamma(2.0, mean / 2.0) + 1e-12,
    }
    return draw[family]()


def model_of(plan):
    """Build the model of a plan."""
    rows = rows_of(plan)
    return by_bambi(plan, rows) if plan.form == "Bambi" else by_hand(plan, rows)


def by_bambi(plan, rows):
    """Build the model as Bambi does."""
    import bambi
    import pandas as pd

    columns = {f"x{k}": x for k, x in enumerate(rows.X.T)}
    columns |= {f"g{k}": index.astype(str) for k, index in enumerate(rows.index)}
    terms = [f"x{k}" for k in range(plan.predictors)]
    terms += [f"(1|g{k})" for k in range(1, len(rows.index))]
    terms.append("(1|g0)" if plan.slopes == "none" else "(x0|g0)")
    family, link = BAMBI[plan.family]
    model = bambi.Model(
        f"y ~ {' + '.join(terms)}", pd.DataFrame(columns | {"y": rows.y}), family=family, link=link
    )
    model.build()
    return model.backend.model


def by_hand(plan, rows):
    """Build the model in PyMC."""
    import pymc as pm

    with pm.Model() as model:
        a = pm.Normal("a", 0, 2)
        beta = pm.Normal("beta", 0, 1, shape=plan.predictors)
        eta = a + pm.math.dot(rows.X, beta)
        for k, index in enumerate(rows.index):
            if k or plan.slopes == "none":
                eta = eta + effects(plan, f"u{k}", f"tau{k}", plan.groups[k])[index]
            elif plan.slopes == "independent":
                intercepts = effects(plan, "u0", "tau0", plan.groups[0])
                slopes = effects(plan, "v0", "omega0", plan.groups[0])
                eta = eta + intercepts[index] + slopes[index] * rows.X[:, 0]
            else:
                both = correlated(plan, plan.groups[0])
                eta = eta + both[index, 0] + both[index, 1] * rows.X[:, 0]
        observe(plan, rows, eta)
    return model


def scale(plan, name):
    """Return a scale with the plan's prior."""
    import pymc as pm

    if plan.prior == "half-normal":
        return pm.HalfNormal(name, 1)
    if plan.prior == "exponential":
        return pm.Exponential(name, 1)
    return pm.HalfStudentT(name, nu=3, sigma=1)


def effects(plan, name, scale_name, groups):
    """Return the effects of groups."""
    import pymc as pm

    tau = scale(plan, scale_name)
    if plan.form == "centred" and plan.effects == "Normal":
        return pm.Normal(name, 0, tau, shape=groups)
    if plan.form == "centred":
        return pm.StudentT(name, nu=4, mu=0, sigma=tau, shape=groups)
    if plan.effects == "Normal":
        z = pm.Normal(f"{name}_z", 0, 1, shape=groups)
    else:
        z = pm.StudentT(f"{name}_z", nu=4, mu=0, sigma=1, shape=groups)
    return pm.Deterministic(name, tau * z)


def correlated(plan, groups):
    """Return correlated intercepts and slopes of groups."""
    import pymc as pm

    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.Exponential.dist(1))
    if plan.form == "centred" and plan.effects == "Normal":
        return pm.MvNormal("u0", 0, chol=chol, shape=(groups, 2))
    if plan.effects == "Normal":
        z = pm.Normal("u0_z", 0, 1, shape=(groups, 2))
    else:
        z = pm.StudentT("u0_z", nu=4, mu=0, sigma=1, shape=(groups, 2))
    return pm.Deterministic("u0", pm.math.dot(z, chol.T))


def observe(plan, rows, eta):
    """Give the outcomes to the model."""
    import pymc as pm

    y, family = rows.y, plan.family
    if family == "normal":
        pm.Normal("y", eta, pm.HalfNormal("sigma", 1), observed=y)
    elif family == "Student t":
        nu = pm.Gamma("nu", 2, 0.1)
        pm.StudentT("y", nu=nu, mu=eta, sigma=pm.HalfNormal("sigma", 1), observed=y)
    elif family == "logit":
        pm.Bernoulli("y", logit_p=eta, observed=y)
    elif family == "probit":
        pm.Bernoulli("y", p=pm.math.invprobit(eta), observed=y)
    elif family == "binomial":
        pm.Binomial("y", n=rows.trials, logit_p=eta, observed=y)
    elif family == "Poisson":
        pm.Poisson("y", pm.math.exp(eta), observed=y)
    elif family == "negative binomial":
        alpha = pm.Exponential("alpha", 0.5)
        pm.NegativeBinomial("y", mu=pm.math.exp(eta), alpha=alpha, observed=y)
    else:
        alpha = pm.Exponential("alpha", 0.5)
        pm.Gamma("y", alpha=alpha, beta=alpha / pm.math.exp(eta), observed=y)


def summary(posterior):
    """Return by variable means, sds and ranges, their Monte Carlo errors, R-hat, effective sizes."""
    import arviz as az
    import xarray as xr

    posterior = xr.Dataset({name: posterior[name] for name in posterior.data_vars})
    found = {
        "mean": posterior.mean(CHAIN_AND_DRAW),
        "sd": posterior.std(CHAIN_AND_DRAW),
        "mean error": az.mcse(posterior, method="mean"),
        "sd error": az.mcse(posterior, method="sd"),
        "range": posterior.quantile(HIGH, CHAIN_AND_DRAW) - posterior.quantile(LOW, CHAIN_AND_DRAW),
        "range error": np.hypot(
            az.mcse(posterior, method="quantile", prob=LOW),
            az.mcse(posterior, method="quantile", prob=HIGH),
        ),
        "R-hat": az.rhat(posterior),
        "ESS": az.ess(posterior),
    }
    names = posterior.data_vars
    return {f"{n}/{key}": np.ravel(x[n].to_numpy()) for key, x in found.items() for n in names}


def of_all(found, key, moving):
    """Return one statistic of all unknowns that move."""
    return of_each(found, dict.fromkeys(moving, key), moving)


def of_each(found, keys, moving):
    """Return of all unknowns that move the statistic that is given for their name."""
    return np.concatenate([found[f"{name}/{keys[name]}"][keep] for name, keep in moving.items()])


def refer(plan):
    """Sample a reference; return its summary with the seconds."""
    import pymc as pm

    began = time.perf_counter()
    try:
        import nutpie
    except ModuleNotFoundError:
        with model_of(plan):
            posterior = pm.sample(
                REFERENCE_DRAWS, tune=TUNE, chains=CHAINS, cores=CORES, random_seed=1,
                progressbar=False, target_accept=0.9, compute_convergence_checks=False,
            ).posterior  # fmt: skip
    else:
        compiled = nutpie.compile_pymc_model(model_of(plan))
        posterior = nutpie.sample(
            compiled, draws=REFERENCE_DRAWS, tune=TUNE, chains=CHAINS, cores=CORES, seed=1,
            progress_bar=False, target_accept=0.9,
        ).posterior  # fmt: skip
    return summary(posterior) | {"seconds": time.perf_counter() - began}


def collect(folder):
    """Put the references of the small models into one file, with what `judge` needs of them."""
    digits = dict.fromkeys(SUMMARISED, np.float16) | dict.fromkeys(SUMMARISED[:3], np.float32)
    arrays = {}
    for seed in SMALL:
        with np.load(folder / f"{seed}-{SMALL_MOST}.npz") as known:
            names = [key.removesuffix("/mean") for key in known if key.endswith("/mean")]
            arrays[f"{seed}/names"] = np.array(names)
            arrays[f"{seed}/sizes"] = np.array([known[f"{name}/mean"].size for name in names])
            for key, dtype in digits.items():  # all variables in one: each array has a header
                values = np.concatenate([known[f"{name}/{key}"] for name in names])
                arrays[f"{seed}/{key}"] = values.astype(dtype)
    np.savez_compressed(SMALL_REFERENCES, **arrays)


def small_reference(seed):
    """Return the summary of the reference of a small model."""
    with np.load(SMALL_REFERENCES) as known:
        names = known[f"{seed}/names"]
        ends = np.cumsum(known[f"{seed}/sizes"])[:-1]
        return {
            f"{name}/{key}": values.astype(float)
            for key in SUMMARISED
            for name, values in zip(names, np.split(known[f"{seed}/{key}"], ends), strict=True)
        }


def sample(plan, rows, reference, cores=CORES):
    """Sample by SGHMC; return a row of the table."""
    import pymc as pm

    from pymc_sghmc import SGHMC

    records = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage()) if warns(record) else None
    for name in ("pymc_sghmc", "pymc"):
        logging.getLogger(name).addHandler(handler)
    with model_of(plan):
        began = time.perf_counter()
        step = SGHMC(batch_size=rows)
        made = time.perf_counter()
        idata = pm.sample(
            DRAWS, tune=TUNE, chains=CHAINS, cores=cores, step=step, random_seed=1,
            progressbar=False,
        )  # fmt: skip
        done = time.perf_counter()
    row = {"set-up": made - began, "sampling": done - made}
    learning_rate = idata.sample_stats["learning_rate"].to_numpy().ravel()[-1]
    row["learning_rate"] = float(learning_rate)
    row |= judge(summary(idata.posterior), reference, long_tailed(plan, reference))
    return row | {"warnings": [message[:160] for message in records]}


def warns(record):
    """Whether a line of a log is a warning; of a high R-hat PyMC tells at the level of news."""
    return record.levelno >= logging.WARNING or "rhat statistic" in record.getMessage()


def long_tailed(plan, reference):
    """Return the names of unknowns whose fourth moments may not exist."""
    names = {key.split("/")[0] for key in reference}
    effects = {name for name in names if re.fullmatch(r"[uv]\d(_z)?|.*\|g\d(_offset)?", name)}
    return (names & {"mu"}) | (effects if plan.effects == "Student t" else set())


def judge(found, reference, by_range=frozenset()):
    """Hold a summary against that of the reference, some of its unknowns by their ranges."""
    names = {key.split("/")[0] for key in found} & {key.split("/")[0] for key in reference}
    moving = {name: reference[f"{name}/sd"] > 1e-9 for name in sorted(names)}
    widths = {name: "range" if name in by_range else "sd" for name in moving}
    values = {key: of_all(found, key, moving) for key in ("mean", "R-hat", "ESS")}
    wanted = {key: of_all(reference, key, moving) for key in ("mean", "sd", "R-hat")}
    size = np.fmax(values["ESS"], 1.0)
    of_run = np.sqrt(of_all(reference, "ESS", moving) / size)  # in errors of the reference
    granted = ERRORS * np.hypot(1.0, of_run)
    sd = wanted["sd"]
    width_errors = {name: f"{width} error" for name, width in widths.items()}
    width = of_each(reference, widths, moving)
    means = np.abs(values["mean"] - wanted["mean"])
    off = np.abs(of_each(found, widths, moving) - width)
    within = means <= MEAN * sd + granted * of_all(reference, "mean error", moving)
    within &= off <= SD * width + granted * of_each(reference, width_errors, moving)
    labels = np.concatenate([[name] * keep.sum() for name, keep in moving.items()])
    worst = int(np.argmax(np.where(within, 0, means / sd + off / width)))
    row = {
        "mean": float((means / sd).max()),
        "sd": float((off / width).max()),
        "R-hat": float(values["R-hat"].max()),
        "least ESS": float(values["ESS"].min()),
        "reference R-hat": float(wanted["R-hat"].max()),
        "outside": int((~within).sum()),
        "worst": None if within.all() else str(labels[worst]),
    }
    mixed = row["R-hat"] <= R_HAT and row["least ESS"] >= LEAST
    return row | {"right": bool(within.all() and mixed)}


def verdict(row):
    """Return one word or two for a row."""
    if row.get("error"):
        return "failed"
    if row["reference R-hat"] > REFERENCE_R_HAT:
        return "no reference"
    if row["right"]:
        return "right"
    return "wrong and loud" if row["warnings"] else "wrong and silent"


def child(command, limit):
    """Run a part in a process of its own; return what its last line says."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, __file__, *command],
            capture_output=True, text=True, timeout=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {limit} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1]) | {"wall": time.perf_counter() - began}


def main():
    """Make references and measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 100], metavar=("FROM", "TO"))
    parser.add_argument("--rows", nargs="*", default=["auto", "500"], help="values of batch_size")
    parser.add_argument("--most", type=int, default=50_000, help="rows of a model")
    parser.add_argument("--limit", type=float, default=900, help="seconds of one run")
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    parser.add_argument("--small", action="store_true", help="references of the slow tests alone")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.child:
        print(json.dumps(part(args)))
        return
    import report

    machine, rows = report.machine(), {}
    args.references.mkdir(parents=True, exist_ok=True)
    if args.small:
        args.most = SMALL_MOST
        args.rows = []
    for seed in SMALL if args.small else range(*args.seeds):
        for way in ["reference", *args.rows]:
            command = ["--references", args.references, "--most", str(args.most)]
            row = child([*command, "--child", str(seed), way], args.limit)
            if way == "reference" or "error" in row:
                report.progress(f"{seed}, {way}", row)
            else:
                rows[f"{seed}, {way}"] = row | {"verdict": verdict(row)}
                report.progress(f"{seed}, {way}", rows[f"{seed}, {way}"])
    if args.small:
        collect(args.references)
        return
    packages = "numpy", "pymc", "pytensor", "numba", "arviz", "bambi", "nutpie", "pymc-sghmc"
    verdicts = {}
    for key, row in rows.items():
        way = verdicts.setdefault(key.split(", ")[1], {})
        way[row["verdict"]] = way.get(row["verdict"], 0) + 1
    result = {"benchmark": "random_groups", "verdicts": verdicts, "rows": rows}
    report.print_json(result | report.closing(machine, *packages))
    if args.markdown:
        keys = ["verdict", "mean", "sd", "R-hat", "least ESS", "set-up", "sampling"]
        table = [[key, *(row.get(k) for k in keys)] for key, row in rows.items()]
        print(report.markdown_table(["seed, batch_size", *keys], table))


def part(args):
    """Run one part: a reference, or a run beside it."""
    seed, way = args.child
    chosen = plan(int(seed), args.most)
    path = args.references / f"{seed}-{args.most}.npz"
    if way == "reference":
        if not path.exists():
            np.savez_compressed(path, **refer(chosen))
        with np.load(path) as known:
            return asdict(chosen) | {"seconds": float(known["seconds"])}
    if not path.exists():
        return {"error": "no reference"}
    with np.load(path) as known:
        reference = dict(known)
    rows = None if way == "None" else int(way) if way.isdigit() else way
    return sample(chosen, rows, reference)


if __name__ == "__main__":
    main()
