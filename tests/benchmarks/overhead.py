"""Cost of one inner step above that of the compiled minibatch gradient in a bare Python loop.

    python tests/benchmarks/overhead.py [--repeats 9] [--mode NUMBA]

Two models: logistic regression with N = 100,000 rows, d = 50, batch 500, float64, and a double
well in one dimension without data. The bare loop calls the compiled gradient, with its log-density
and without control variates, at a posterior draw on rows drawn beforehand, other ones at every call:
repeating the same rows would keep them in the processor's cache, which no sampler can
(``gradient_same_rows`` shows by how much). The loops and the sampler, ten inner steps per draw,
alternate within one run, and medians are compared, since machines are noisy. Prints one line of
JSON.
"""

import argparse
import itertools
import json
import platform
import time

import numpy as np
import pymc as pm
import pytensor

import pymc_sghmc

from pymc_sghmc import SGHMC, SGLD


def logistic(n_rows=100_000, d=50, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n_rows, d))
    beta = rng.standard_normal(d) / np.sqrt(d)
    y = rng.binomial(1, 1 / (1 + np.exp(-X @ beta)))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=d)
        pm.Bernoulli("y", logit_p=pm.Data("X", X) @ beta, observed=y)
    return model


def double_well():
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("energy", 2 * x**2 - x**4)
    return model


def microseconds(function, calls) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


def arguments(gradient, position, minibatch):
    """Record the arguments with which the gradient calls its compiled function."""
    density = gradient.density
    function, recorded = density.function, []
    density.function = lambda *args: recorded.append(args) or function(*args)
    gradient(position, minibatch)
    density.function = function
    return recorded[0]


def measure(model, sampler, repeats, mode, **settings):
    with model:
        step = sampler(n_steps=10, compile_kwargs={"mode": mode} if mode else None, **settings)
    step.stop_tuning()
    state = {"point": model.initial_point()}

    def draw():
        state["point"], _ = step.step(state["point"])

    for _ in range(300):  # from the start, where exp() is cheap, into the posterior
        draw()
    gradient, rng = step.tuner.gradient, np.random.default_rng(1)
    position, function = step.unknowns.ravel(state["point"]), gradient.density.function
    calls = [arguments(gradient, position, gradient.order.probe(rng)) for _ in range(2000)]
    others = itertools.cycle(calls)

    def bare():
        function(*next(others))

    def same():
        function(*calls[0])

    times = {"gradient": [], "gradient_same_rows": [], "inner_step": []}
    for _ in range(repeats):
        times["gradient"].append(microseconds(bare, 2000))
        times["gradient_same_rows"].append(microseconds(same, 2000))
        times["inner_step"].append(microseconds(draw, 200) / step.settings["n_steps"])
    result = {name: round(float(np.median(values)), 2) for name, values in times.items()}
    result["ratio"] = round(result["inner_step"] / result["gradient"], 3)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mode", default=None, help="PyTensor mode; default: PyTensor's own")
    args = parser.parse_args()
    batch = {"batch_size": 500, "learning_rate": 1e-6, "gradient": "plain"}
    paper = {"friction": 0.1, "noise_estimate": None, "integrator": "euler"}
    result = {
        "benchmark": "overhead",
        "unit": "microseconds, medians",
        "mode": args.mode or str(pytensor.config.mode),
        "logistic_sghmc": measure(logistic(), SGHMC, args.repeats, args.mode, **batch, **paper),
        "logistic_sghmc_defaults": measure(
            logistic(), SGHMC, args.repeats, args.mode, batch_size=500
        ),
        "logistic_sgld": measure(logistic(), SGLD, args.repeats, args.mode, **batch),
        "double_well_sghmc": measure(
            double_well(), SGHMC, args.repeats, args.mode, learning_rate=1e-2, **paper
        ),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "pymc": pm.__version__,
            "pytensor": pytensor.__version__,
            "pymc_sghmc": pymc_sghmc.__version__,
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
