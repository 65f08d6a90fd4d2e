"""Draws for a seed, stored from one checkout and compared with those of another.

    python tests/benchmarks/draws.py store BEFORE --checkout FOLDER   # a folder that holds pymc_sghmc
    python tests/benchmarks/draws.py store AFTER
    python tests/benchmarks/draws.py compare BEFORE AFTER

``store`` runs each kind of step below on a small model, with one seed, and writes its draws. A kind
is a sampler, a gradient, a backend of PyTensor and a form of the data: in memory, streamed, grouped,
with group effects partially centred or integrated out. ``--only WORD`` takes the kinds with this word
in their names. ``compare`` prints for each kind "equal" (bit for bit) or the largest difference in
posterior standard deviations, and ends with exit status 1 if a kind differs. Results are comparable
between checkouts on one machine, with the same versions of PyMC, PyTensor and Numba: compilers of
other versions round differently.

A failing kind is stored as the text of its error, and compared as such.
"""

import argparse
import logging
import os
import sys
import time
import warnings

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

# PyMC's own helper functions needn't be fast; what the steps compile has a mode of its own.
os.environ.setdefault("PYTENSOR_FLAGS", "mode=FAST_COMPILE,gcc__cxxflags=-O1")
N_ROWS = 600
TUNE, DRAWS, CHAINS = 15, 15, 2
BATCH = {"batch_size": 60}


def regression():
    """Logistic regression with three coefficients, and a count that shares them."""
    import pymc as pm

    rng = np.random.default_rng(0)
    X = rng.standard_normal((N_ROWS, 3))
    y = rng.binomial(1, 1 / (1 + np.exp(-X @ [0.5, -0.5, 0.2])))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Bernoulli("y", logit_p=pm.math.dot(pm.Data("X", X), beta), observed=pm.Data("z", y))
    return model


def two_outcomes():
    """Two observed variables, a scale parameter, Student's t."""
    import pymc as pm

    rng = np.random.default_rng(1)
    x = rng.standard_normal(N_ROWS)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 1)
        sigma = pm.HalfNormal("sigma", 1)
        mu = slope * pm.Data("x", x)
        pm.StudentT("y", nu=4, mu=mu, sigma=sigma, observed=0.4 * x + rng.standard_t(4, N_ROWS))
        pm.Poisson("k", pm.math.exp(0.3 * mu), observed=rng.poisson(np.exp(0.12 * x)))
    return model


def streamed(n_stand_in=20):
    """The regression, built on its first rows, and a loader of all."""
    from pymc_sghmc.loaders import ArrayLoader

    model = regression()
    arrays = {name: np.asarray(model[name].get_value()) for name in ("X", "z")}
    with model:
        import pymc as pm

        pm.set_data({name: array[:n_stand_in] for name, array in arrays.items()})
    return model, {"data": ArrayLoader(arrays, block_rows=50, buffer_rows=200)}


def groups(likelihood="bernoulli", centred=True):
    """Forty group intercepts with 15 rows each."""
    import pymc as pm

    rng = np.random.default_rng(2)
    group = rng.integers(0, 40, N_ROWS)
    x = rng.standard_normal(N_ROWS)
    eta = 0.3 + 0.5 * x + 0.7 * rng.standard_normal(40)[group]
    with pm.Model() as model:
        slope = pm.Normal("slope", 0, 1)
        tau = pm.HalfNormal("tau", 1)
        if centred:
            u = pm.Normal("u", 0, tau, shape=40)
        else:
            u = pm.Deterministic("u", tau * pm.Normal("z", 0, 1, shape=40))
        mu = 0.3 + slope * pm.Data("x", x) + u[pm.Data("g", group)]
        if likelihood == "bernoulli":
            y = rng.binomial(1, 1 / (1 + np.exp(-eta)))
            pm.Bernoulli("y", logit_p=mu, observed=y)
        else:
            pm.Normal("y", mu, 1, observed=eta + rng.standard_normal(N_ROWS))
    return model


def few_strong_groups():
    """Two groups of hundreds of rows among many small ones."""
    import pymc as pm

    rng = np.random.default_rng(3)
    group = np.r_[np.zeros(200, int), np.ones(150, int), rng.integers(2, 40, N_ROWS - 350)]
    y = rng.poisson(np.exp(0.5 * rng.standard_normal(40)[group]))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 1)
        tau = pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=40)
        pm.Poisson("y", pm.math.exp(level + u[group]), observed=y)
    return model


def with_an_integer():
    """An integer parameter, which PyMC gives another step, beside the regression's."""
    import pymc as pm

    rng = np.random.default_rng(4)
    y = rng.normal(1.0, 1.0, N_ROWS)
    with pm.Model() as model:
        k = pm.Poisson("k", 2)
        mu = pm.Normal("mu", 0, 1)
        pm.Normal("y", mu + 0.01 * k, 1, observed=y)
    return model


def step_of(cls_name, settings):
    """Return a function that makes the step inside a model's context."""

    def make(**more):
        import pymc_sghmc

        return getattr(pymc_sghmc, cls_name)(**settings, **more)

    return make


EULER = {"friction": 0.1, "noise_estimate": None, "integrator": "euler"}
RULES = {
    "sghmc": step_of("SGHMC", {}),
    "sghmc-euler": step_of("SGHMC", EULER),
    "sgld": step_of("SGLD", {}),
    "sgnht": step_of("SGNHT", {}),
}
BACKENDS = {"default": {}, "other": {"compile_kwargs": {"mode": "other"}}}


def _kinds() -> dict[str, tuple[Callable, Callable, dict]]:
    """Name of a kind: model, step, arguments of the step."""
    kinds = {}
    for rule, make in RULES.items():
        for gradient in ("plain", "control_variates", "second_order"):
            for backend, compiling in BACKENDS.items():
                settings = {**BATCH, **compiling, "gradient": gradient}
                kinds[f"{rule}/{gradient}/memory/{backend}"] = regression, make, settings
    sghmc = RULES["sghmc"]
    for rule in ("sghmc", "sgld"):
        for gradient in ("plain", "control_variates"):
            kinds[f"{rule}/{gradient}/stream/default"] = (
                streamed, RULES[rule], {**BATCH, "gradient": gradient},
            )  # fmt: skip
    for rule in ("sghmc", "sgld", "sgnht"):
        for name, more in {"batch": {"batch_size": 8}, "all-rows": {}}.items():
            settings = {**more, "marginalize": ["u"]}
            kinds[f"{rule}/auto/marginal-{name}/default"] = groups, RULES[rule], settings
    normal = partial(groups, "normal")
    other = BACKENDS["other"]
    more_kinds = {
        "auto/marginal-other": (groups, {"batch_size": 8, "marginalize": ["u"], **other}),
        "auto/marginal-normal": (normal, {"batch_size": 8, "marginalize": ["u"]}),
        "auto/marginal-not-recovered": (
            groups, {"batch_size": 8, "marginalize": ["u"], "recover": False},
        ),
        "auto/marginal-large-groups": (few_strong_groups, {"batch_size": 10, "marginalize": ["u"]}),
        "auto/groups": (groups, BATCH),
        "auto/groups-all-rows": (groups, {}),
        "auto/groups-other": (groups, {**BATCH, **other}),
        "auto/groups-non-centred": (partial(groups, centred=False), BATCH),
        "first/groups": (groups, {**BATCH, "gradient": "control_variates"}),
        "auto/groups-by-hand": (groups, {**BATCH, "centring": {"u": 0.4}}),
        "auto/groups-off": (groups, {**BATCH, "centring": None}),
        "auto/all-rows": (regression, {}),
        "auto/rows-auto": (regression, {"batch_size": "auto"}),
        "auto/without-replacement": (regression, {**BATCH, "replace": False}),
        "auto/dense": (regression, {**BATCH, "preconditioner": "dense"}),
        "auto/diag": (regression, {**BATCH, "preconditioner": "diag"}),
        "plain/no-preconditioner": (
            regression, {**BATCH, "gradient": "plain", "preconditioner": None, "learning_rate": 1e-4},
        ),
        "auto/python-steps": (regression, {**BATCH, "n_steps": 1}),
        "auto/two-outcomes": (two_outcomes, BATCH),
        "auto/other-step": (with_an_integer, BATCH),
    }  # fmt: skip
    for name, (build, settings) in more_kinds.items():
        kinds[f"sghmc/{name}"] = build, sghmc, settings
    kinds["qnhmc/all-rows"] = regression, step_of("QNHMC", {}), {}
    kinds["qnhmc/groups"] = groups, step_of("QNHMC", {}), {}
    return kinds


KINDS = _kinds()


def draws_of(name):
    """Sample one kind; the draws of both chains by name of the parameter."""
    import pymc as pm

    build, make, settings = KINDS[name]
    built = build()
    model, more = built if isinstance(built, tuple) else (built, {})
    settings = {**settings, **more}
    if settings.get("compile_kwargs", {}).get("mode") == "other":
        # PyMC 6 compiles by Numba, PyMC 5 by C
        mode = "NUMBA" if pm.__version__.startswith("5") else "CVM"
        settings["compile_kwargs"] = {"mode": mode}
    with model:
        if build is with_an_integer:
            settings["vars"] = [model["mu"]]
        step = make(**settings)
        idata = pm.sample(
            DRAWS, tune=TUNE, chains=CHAINS, cores=1, step=step, random_seed=5,
            progressbar=False, compute_convergence_checks=False,
        )  # fmt: skip
    posterior = idata.posterior
    posterior = getattr(posterior, "ds", posterior)
    return {str(key): np.asarray(value) for key, value in posterior.data_vars.items()}


def store(folder, only):
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for name in KINDS:
        if only and not any(word in name for word in only):
            continue
        began = time.perf_counter()
        try:
            draws = draws_of(name)
        except Exception as error:
            draws = {"error": np.array(f"{type(error).__name__}: {error}")}
        np.savez(folder / f"{name.replace('/', '__')}.npz", **draws)
        said = str(draws.get("error", ""))[:90]
        print(f"{name}  {time.perf_counter() - began:.1f} s  {said}", flush=True)


def difference(before, after) -> float:
    """Largest difference of two draws in standard deviations of the first; NaN counts as equal."""
    if before.shape != after.shape:
        return float("inf")
    scale = np.nanstd(before, axis=(0, 1)) + np.finfo(float).tiny
    apart = np.abs(np.where(np.isnan(before) & np.isnan(after), 0.0, after - before))
    return float((apart / scale).max(initial=0.0))


def compare(before, after) -> int:
    n_differ = 0
    for path in sorted(before.glob("*.npz")):
        name = path.stem.replace("__", "/")
        if not (after / path.name).exists():
            print(f"{name}  missing")
            n_differ += 1
            continue
        old = np.load(path)
        new = np.load(after / path.name)
        if "error" in old or "error" in new or set(old) != set(new):
            same = set(old) == set(new) and str(old.get("error")) == str(new.get("error"))
            said = str(new.get("error", sorted(new)))
            print(f"{name}  {'the same error' if same else 'DIFFERS'}: {said}")
            n_differ += not same
            continue
        if all(np.array_equal(old[key], new[key], equal_nan=True) for key in old):
            print(f"{name}  equal")
            continue
        worst = max(difference(old[key], new[key]) for key in old)
        print(f"{name}  DIFFERS by {worst:.2g} standard deviations")
        n_differ += 1
    print(f"{n_differ} kinds differ")
    return int(n_differ > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    storing = commands.add_parser("store")
    storing.add_argument("folder", type=Path)
    storing.add_argument("--checkout", type=Path, default=Path(__file__).parents[2])
    storing.add_argument("--only", nargs="*", default=())
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compare(arguments.before, arguments.after)
    sys.path.insert(0, str(arguments.checkout.resolve()))
    store(arguments.folder, arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
