"""Seconds from a fresh process to 400 effective draws, by part, beside PyMC's NUTS and nutpie.

    python tests/benchmarks/start.py [--model NAME ...] [--sampler NAME ...] [--markdown]

Each row is a process of its own, first with an empty compilation cache and then with the one that
it left. Python's own bytecode is there, as pip leaves it: a first run of each sampler, which isn't
counted, writes what is missing. One BLAS thread and, for each chain, one process; two chains of
1,000 + 1,000 draws, as ``cores=2`` gives. Parts of SGHMC are told by its own phases: building and
compiling functions, and passes over the data with what is computed from them. "To 400" is the time
until the least effective size over all free parameters but effects that are integrated out is 400,
extrapolated in the number of draws after tuning. CPU seconds count child processes, compilers among
them. CPU seconds until the first draw are those of this process, which compiles. nutpie needs an
environment that has it, MovieLens the shared data.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

CHAINS = 2
TUNE = DRAWS = 1000
ENOUGH = 400  # effective draws
SAMPLERS = ("SGHMC", "NUTS", "nutpie")
LONGEST = 1200  # seconds of a process


def linear_predictor(n, d, seed=1):
    """Rows X and Xb of some coefficients."""
    import numpy as np

    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d))
    return rng, X, X @ rng.normal(0, 0.3, d)


def logistic(n, d=50):
    """Logistic regression."""
    import pymc as pm

    rng, X, eta = linear_predictor(n, d)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=d)
        y = rng.binomial(1, 1 / (1 + _exp(-eta)))
        pm.Bernoulli("y", logit_p=pm.math.dot(pm.Data("X", X), beta), observed=pm.Data("obs", y))
    return model


def _exp(x):
    import numpy as np

    return np.exp(x)


def categorical():
    """Bambi's categorical regression, 10,000 rows, three classes."""
    import bambi
    import numpy as np
    import pandas as pd

    rng, X, _ = linear_predictor(10_000, 3)
    scores = X @ rng.normal(0, 0.7, (3, 3)) + rng.gumbel(size=(10_000, 3))
    data = pd.DataFrame(X, columns=["a", "b", "c"])
    data["y"] = np.array(["one", "three", "two"])[scores.argmax(axis=1)]
    model = bambi.Model("y ~ a + b + c", data, family="categorical")
    model.build()
    return model.backend.model


def correlated():
    """Bambi's ``y ~ x + (x|g)``, 12,000 rows in 120 groups."""
    import bambi
    import pandas as pd

    rng, X, _ = linear_predictor(12_000, 1)
    g = rng.integers(120, size=12_000)
    effects = rng.multivariate_normal([0.3, 0.5], [[0.3, 0.1], [0.1, 0.2]], size=120)
    y = effects[g, 0] + effects[g, 1] * X[:, 0] + rng.standard_normal(12_000)
    data = pd.DataFrame({"x": X[:, 0], "g": g.astype(str), "y": y})
    model = bambi.Model("y ~ x + (x|g)", data)
    model.build()
    return model.backend.model


def mixture():
    """A mixture of two normal distributions in order, 20,000 rows."""
    import numpy as np
    import pymc as pm

    rng = np.random.default_rng(1)
    y = np.where(rng.random(20_000) < 0.3, rng.normal(-1, 0.8, 20_000), rng.normal(2, 1, 20_000))
    with pm.Model() as model:
        w = pm.Dirichlet("w", np.ones(2))
        mu = pm.Normal("mu", 0, 3, shape=2, transform=pm.distributions.transforms.ordered,
                       initval=[-1.0, 1.0])  # fmt: skip
        sigma = pm.HalfNormal("sigma", 2, shape=2)
        pm.NormalMixture("y", w, mu, sigma, observed=pm.Data("obs", y))
    return model


def grouped(groups=500, rows=40):
    """Logistic regression with an intercept for each group."""
    import numpy as np
    import pymc as pm

    rng, X, eta = linear_predictor(groups * rows, 3)
    g = np.repeat(np.arange(groups), rows)
    y = rng.binomial(1, 1 / (1 + _exp(-eta - rng.normal(0, 0.7, groups)[g])))
    with pm.Model() as model:
        tau = pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=groups)
        beta = pm.Normal("beta", 0, 1, shape=3)
        eta = pm.math.dot(pm.Data("X", X), beta) + u[pm.Data("g", g)]
        pm.Bernoulli("y", logit_p=eta, observed=pm.Data("obs", y))
    return model


def counts(groups=700, n=17_000):
    """Negative binomial counts with an intercept for each group, non-centred."""
    import pymc as pm

    rng, X, eta = linear_predictor(n, 3)
    g = rng.integers(groups, size=n)
    mu = _exp(1 + eta + rng.normal(0, 0.6, groups)[g])
    y = rng.negative_binomial(3, 3 / (3 + mu))
    with pm.Model() as model:
        tau = pm.HalfNormal("tau", 1)
        z = pm.Normal("z", 0, 1, shape=groups)
        beta = pm.Normal("beta", 0, 1, shape=3)
        eta = pm.Normal("a", 0, 2) + pm.math.dot(pm.Data("X", X), beta) + (tau * z)[pm.Data("g", g)]
        alpha = pm.Exponential("alpha", 0.5)
        pm.NegativeBinomial("y", pm.math.exp(eta), alpha, observed=pm.Data("obs", y))
    return model


def visits():
    """Return the README's model: negative binomial regression, 20,190 rows."""
    import pymc as pm

    from statsmodels.datasets import randhie

    data = randhie.load_pandas().data
    predictors = data.drop(columns="mdvis")
    predictors = (predictors - predictors.mean()) / predictors.std()
    with pm.Model(coords={"predictor": predictors.columns}) as model:
        intercept = pm.Normal("intercept", 0, 2)
        beta = pm.Normal("beta", 0, 1, dims="predictor")
        alpha = pm.HalfNormal("alpha", 2)
        mu = pm.math.exp(intercept + predictors.to_numpy() @ beta)
        pm.NegativeBinomial("visits", mu=mu, alpha=alpha, observed=data["mdvis"])
    return model


def ratings():
    """MovieLens 100,000, users crossed with films, as Bambi writes effects."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from model_collection.grouped import movielens

    return movielens("non-centred", 100_000)


def integrated_out(n):
    """Logistic regression with an intercept for each ten rows, to be integrated out."""
    from units import model_of

    return model_of(n)


MODELS = {
    "README": visits,
    "logistic 10⁴ × 50": lambda: logistic(10_000),
    "logistic 10⁵ × 50": lambda: logistic(100_000),
    "logistic 10⁶ × 50": lambda: logistic(1_000_000),
    "categorical": categorical,
    "(x|g)": correlated,
    "mixture": mixture,
    "grouped 500 × 40": grouped,
    "MovieLens, 100,000": ratings,
    "negative binomial, 700 groups": counts,
    "integrated out, 10⁵": lambda: integrated_out(100_000),
    "integrated out, 10⁶": lambda: integrated_out(1_000_000),
    "integrated out, 10⁷": lambda: integrated_out(10_000_000),
}
OPTIONS = {"marginalize": "u", "recover": False}  # of SGHMC, where effects are integrated out


def cpu():
    """CPU seconds of this process and those that it has waited for."""
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Clock:
    """Wall and CPU seconds of parts."""

    def __init__(self):
        self.parts = {}
        self.first_draw = None
        self._start = self._last = time.perf_counter(), cpu()

    def end(self, part):
        """End a part."""
        now = time.perf_counter(), cpu()
        self.parts[part] = [b - a for a, b in zip(self._last, now, strict=True)]
        self._last = now

    def note_draw(self, trace, draw):
        """Remember when the first draw came; `pm.sample` calls this for each."""
        if self.first_draw is None:
            now = time.perf_counter(), cpu()
            self.first_draw = [b - a for a, b in zip(self._start, now, strict=True)]


def run(name, sampler):
    """One row, in this process."""
    clock = Clock()
    import arviz as az
    import numpy as np
    import pymc as pm

    from pymc_sghmc import SGHMC

    if sampler == "nutpie":
        import nutpie  # noqa: F401
    clock.end("import")
    compiled = counted_functions()
    with MODELS[name]() as model:
        clock.end("model")
        own = OPTIONS if name.startswith("integrated out") else {}
        free = [rv.name for rv in model.free_RVs if rv.name != own.get("marginalize")]
        options, row = {"step": None}, {}
        if own:
            options["var_names"] = free
        if sampler == "SGHMC":
            options["step"], row = make(SGHMC, own)
            clock.end("set-up")
        if sampler == "nutpie":
            options["nuts_sampler"] = "nutpie"
        else:
            options["callback"] = clock.note_draw
        idata = pm.sample(
            DRAWS, tune=TUNE, chains=CHAINS, cores=CHAINS, random_seed=1, progressbar=False,
            compute_convergence_checks=False, **options,
        )  # fmt: skip
    clock.end("pm.sample")
    draws = [idata.posterior[v].to_numpy().reshape(CHAINS, DRAWS, -1) for v in free]
    least = min(float(az.ess(x[..., i])) for x in draws for i in range(x.shape[-1]))
    finite = least if np.isfinite(least) else 1.0
    wall, used = clock.parts["pm.sample"]
    share = (TUNE + DRAWS * min(1.0, ENOUGH / finite)) / (TUNE + DRAWS)
    before = [sum(part[k] for p, part in clock.parts.items() if p != "pm.sample") for k in (0, 1)]
    return row | {
        "seconds": clock.parts, "functions": len(compiled), "least ESS": least,
        "first draw": clock.first_draw,
        "to 400, wall": before[0] + wall * share, "to 400, CPU": before[1] + used * share,
    }  # fmt: skip


def make(sampler, options):
    """Make a step; return it and what its set-up consisted of."""
    from pymc_sghmc.step import setup_display

    seen = []
    made = setup_display.SetupDisplay.__init__

    def remember(self, *args):
        made(self, *args)
        seen.append(self)

    setup_display.SetupDisplay.__init__ = remember
    step = sampler(**options)
    [display] = seen
    row = {
        "passes": display.passes,
        "phases": dict(display.seconds),
        "compiling": display.compiling,
    }
    return step, row


def counted_functions():
    """Return a list that gets an entry for each function that PyTensor makes."""
    from pytensor.compile import FunctionMaker

    compiled = []
    made = FunctionMaker.create

    def create(self, *args, **kwargs):
        compiled.append(1)
        return made(self, *args, **kwargs)

    FunctionMaker.create = create
    return compiled


def child(name, sampler, cache):
    """Run a row in a process of its own."""
    flags = f"base_compiledir={cache}"
    environment = {**os.environ, "PYTENSOR_FLAGS": flags, "NUMBA_CACHE_DIR": f"{cache}/numba"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--child", name, sampler]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {LONGEST} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME")
    parser.add_argument("--sampler", nargs="+", default=list(SAMPLERS), choices=SAMPLERS)
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(*args.child)))
        return
    import report

    machine = report.machine()
    for sampler in args.sampler:
        with tempfile.TemporaryDirectory() as cache:
            child("README", sampler, cache)
    rows = {}
    for name in args.model:
        for sampler in args.sampler:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("nothing cached", "all cached"):
                    key = f"{name}, {sampler}, {state}"
                    rows[key] = child(name, sampler, cache)
                    report.progress(key, rows[key])
    packages = "numpy", "pymc", "pytensor", "numba", "arviz", "bambi", "nutpie", "pymc-sghmc"
    result = {"benchmark": "start", "rows": rows, **report.closing(machine, *packages)}
    report.print_json(result)
    if args.markdown:
        titles = ["to 400, wall", "to 400, CPU", "compiling", "passes", "least ESS"]
        table = []
        for key, row in rows.items():
            made = row.get("seconds", {}).get("set-up")
            cpu_seconds = [part and part[1] for part in (made, row.get("first draw"))]
            table.append([key, *map(row.get, titles), *cpu_seconds])
        print(report.markdown_table(["", *titles, "step, CPU", "first draw, CPU"], table))
        print(report.note(result))


if __name__ == "__main__":
    main()
