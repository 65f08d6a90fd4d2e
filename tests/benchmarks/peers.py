"""The peers of `versus.py`, one to a process: sample with METHOD, leave draws and seconds in OUT.

    python tests/benchmarks/peers.py METHOD --n N --reference FILE --out FILE

Each function builds its model from the rows and returns draws of shape (chains, draws, unknowns)
with its seconds. ``setup`` is compilation and what comes before sampling, such as a mode;
``sampling`` includes tuning; ``drawing`` is the part of it that is not tuning.
"""

import os

# Chains run in processes or threads of their own: BLAS threads in each would fight for the cores.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)
# NumPy's and PyMC's arithmetic for JAX as well.
os.environ.update(JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu")

import argparse
import importlib.metadata
import json
import logging
import platform
import sys
import time
import warnings

from collections import defaultdict
from pathlib import Path

import numpy as np

BATCH = 500
CHAINS = 4
CORES = 2
UNKNOWNS = 50
CONDITION = 30  # of the predictors' covariance
DRAWS = TUNE = 1000
NUTPIE_TUNE = 300
ADVI_DRAWS = 20_000  # independent ones from the fitted approximation
# NumPyro's examples/hmcecs.py, but for its subsample of 1,300 rows.
HMCECS = {"num_blocks": 100, "num_warmup": 500, "num_samples": 500, "svi_steps": 5000}
# BlackJAX's sampling book, "MLP classifier": 60,000 rows and (rows // 512) · 20 steps of warm-up.
# With more rows the steps are cut to 60,000/N and √(60,000/N): as it stands SGLD's diverges.
BOOK_ROWS, BOOK_BATCH, BOOK_STEP = 60_000, 512, {"sgld": 4.5e-5, "sghmc": 4.5e-6}
GRADIENTS_PER_DRAW = 50  # of BlackJAX's chains, for 1,000 kept draws with something between them
GRID = tuple(10 ** (k / 2) for k in range(-5, 1))  # c: steps c/N of SGLD and √(c/N) of SGHMC
GRID_WARMUP = 10_000  # gradients
VERSIONS = [
    "numpy",
    "pymc",
    "pytensor",
    "arviz",
    "nutpie",
    "numpyro",
    "blackjax",
    "jax",
    "pymc-sghmc",
]


def rows(n):
    """Predictors of mean variance 1, and outcomes of a logistic regression of them."""
    rng = np.random.default_rng(1)
    scales = np.geomspace(1, CONDITION, UNKNOWNS)
    rotation = np.linalg.qr(rng.standard_normal((UNKNOWNS, UNKNOWNS)))[0]
    root = (scales / scales.mean()) ** 0.5 * rotation
    beta = rng.standard_normal(UNKNOWNS)
    X = rng.standard_normal((n, UNKNOWNS)) @ root.T
    return X, (rng.random(n) < 1 / (1 + np.exp(-X @ beta))).astype(float)


def regression(X, y, total_size=None):
    import pymc as pm

    beta = pm.Normal("beta", 0, 1, shape=UNKNOWNS)
    pm.Bernoulli("y", logit_p=X @ beta, observed=y, total_size=total_size)


def full_model(X, y):
    import pymc as pm

    with pm.Model() as model:
        regression(pm.Data("X", X), pm.Data("outcome", y.astype("int32")))
    return model


def draws_of(idata):
    return np.asarray(idata.posterior["beta"])


def nutpie(X, y, *, reference, limit, nutpie_draws):
    import nutpie
    import pymc as pm

    def sample(model, seconds):
        """Return what was drawn, or None if it took too long, with times of every chain."""
        start = time.perf_counter()
        compiled = nutpie.compile_pymc_model(model)
        setup = time.perf_counter() - start
        log = defaultdict(lambda: [(time.perf_counter(), 0, 0)])  # of (when, draws, gradients)

        def watch(chains):
            for i, chain in enumerate(chains):
                if chain.started and log[i][-1][1] != chain.finished_draws:
                    entry = chain.finished_draws, chain.total_num_steps
                    log[i].append((time.perf_counter(), *entry))

        begin = time.perf_counter()
        sampler = nutpie.sample(
            compiled,
            draws=nutpie_draws,
            tune=NUTPIE_TUNE,
            chains=CHAINS,
            cores=CORES,
            seed=1,
            progress_bar=False,
            progress_callback=watch,
            progress_rate=20,
            blocking=False,
        )
        try:
            idata = sampler.wait(timeout=seconds)
        except TimeoutError:
            idata = None
            abandoned.append(sampler)
        return idata, {"setup": setup, "sampling": time.perf_counter() - begin}, log

    def gradients(idata):
        tuning = float(idata.warmup_sample_stats["n_steps"].sum())
        return tuning, float(idata.sample_stats["n_steps"].sum())

    abandoned = []  # It is not deleted: that would wait for the draws under way.
    idata, seconds, log = sample(full_model(X, y), limit)
    if idata is not None:
        drawing = sum(
            chain[-1][0] - next(when for when, draws, _ in chain if draws >= NUTPIE_TUNE)
            for chain in log.values()
        )
        tuning, after = gradients(idata)
        per_gradient = CORES * seconds["sampling"] / (tuning + after)
        return draws_of(idata), {
            **seconds,
            "drawing": drawing / CORES,
            "seconds_per_gradient": per_gradient,
        }
    # Seconds per gradient are known; how many it takes and what they bring, a Gaussian with the
    # posterior's covariance tells.
    done = [(chain[-1][0] - chain[0][0], chain[-1][2]) for chain in log.values()]
    if not sum(steps for _, steps in done):
        raise TimeoutError(f"no draw in {limit:g} s")
    per_gradient = sum(span for span, _ in done) / sum(steps for _, steps in done)
    with pm.Model() as gaussian:
        beta = pm.Flat("beta", shape=UNKNOWNS)
        away = beta - reference["mode"]
        pm.Potential("logp", -0.5 * away @ (np.linalg.inv(reference["covariance"]) @ away))
    idata, _, _ = sample(gaussian, None)
    tuning, after = gradients(idata)
    return draws_of(idata), {
        "setup": seconds["setup"],
        "sampling": per_gradient * (tuning + after) / CORES,
        "drawing": per_gradient * after / CORES,
        "seconds_per_gradient": per_gradient,
        "extrapolated": True,
        "measured_seconds": seconds["sampling"],
        "measured_gradients": sum(steps for _, steps in done),
    }


def advi(X, y, iterations=10_000):
    import pymc as pm

    start, first = time.perf_counter(), []

    def compiled(approximation, losses, iteration):
        if not first:
            first.append(time.perf_counter())

    with pm.Model():
        # With int64, PyMC casts the minibatch to int32 and then refuses it as observed data.
        batch = pm.Minibatch(X, y.astype("int32"), batch_size=BATCH)
        regression(*batch, total_size=len(y))
        approximation = pm.fit(
            iterations, method="advi", callbacks=[compiled], random_seed=1, progressbar=False
        )
    draws = draws_of(approximation.sample(ADVI_DRAWS, random_seed=1))
    setup = first[0] - start
    sampling = time.perf_counter() - first[0]
    return draws, {"setup": setup, "sampling": sampling, "independent": True}


def advi_60000(X, y):
    return advi(X, y, 60_000)


def hmcecs(X, y):
    import jax
    import numpyro
    import numpyro.distributions as dist

    from numpyro.infer import HMCECS as Kernel
    from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, autoguide

    numpyro.set_host_device_count(CHAINS)  # XLA's threads share the cores there are.
    compiling = []

    def listen(event, duration, **_):
        if event.endswith(("jaxpr_to_mlir_module_duration", "backend_compile_duration")):
            compiling.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)

    def model(X, y, subsample_size):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([UNKNOWNS]).to_event(1))
        with numpyro.plate("N", len(X), subsample_size=subsample_size):
            batch = numpyro.subsample(X, event_dim=1)
            outcome = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Bernoulli(logits=batch @ beta), obs=outcome)

    start = time.perf_counter()
    X, y = jax.numpy.asarray(X), jax.numpy.asarray(y)
    svi_key, key = jax.random.split(jax.random.key(1))
    guide = autoguide.AutoDelta(model)
    svi = SVI(model, guide, numpyro.optim.Adam(step_size=1e-3), loss=Trace_ELBO())
    fit = svi.run(svi_key, HMCECS["svi_steps"], X, y, BATCH, progress_bar=False)
    proxy = Kernel.taylor_proxy({"beta": fit.params["beta_auto_loc"]})
    setup = time.perf_counter() - start

    def sample(draws):
        """Return draws and seconds, those of compilation apart."""
        mcmc = MCMC(
            Kernel(NUTS(model), num_blocks=HMCECS["num_blocks"], proxy=proxy),
            num_warmup=HMCECS["num_warmup"],
            num_samples=draws,
            num_chains=CHAINS,
            progress_bar=False,
        )
        compiling.clear()
        start = time.perf_counter()
        mcmc.run(key, X, y, BATCH)
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
        return draws, time.perf_counter() - start - sum(compiling), sum(compiling)

    draws, sampling, compilation = sample(HMCECS["num_samples"])
    # Of parallel chains with a proxy, NumPyro does not go on from a warm-up: it is timed by itself.
    _, warmup, _ = sample(1)
    return draws, {
        "setup": setup + compilation,
        "sampling": sampling,
        "drawing": sampling - warmup,
    }


def mode_of(log_density):
    """Mode of a function that JAX differentiates."""
    import jax

    from scipy.optimize import minimize

    negative = jax.jit(jax.value_and_grad(lambda beta: -log_density(beta)))
    return minimize(negative, np.zeros(UNKNOWNS), jac=True, method="L-BFGS-B").x


def book_step(sampler, n):
    """Step size of the sampling book for n rows, and the power of 1/n with which it falls."""
    power = {"sgld": 1, "sghmc": 0.5}[sampler]
    return BOOK_STEP[sampler] * min(1.0, BOOK_ROWS / n) ** power, power


def scanned(step, n):
    """Chain of a step on minibatches of n rows: f(key, position, data, step size, draws, thin)."""
    import jax

    def one(carry, _):
        key, beta, data, step_size = carry
        key, batch_key, step_key = jax.random.split(key, 3)
        i = jax.random.randint(batch_key, (BATCH,), 0, n)
        beta = step(step_key, beta, (data[0][i], data[1][i]), step_size)
        return (key, beta, data, step_size), None

    def chain(key, beta, data, step_size, draws, thin):
        def draw(carry, _):
            carry, _ = jax.lax.scan(one, (*carry, data, step_size), length=thin)
            return carry[:2], carry[1]

        return jax.lax.scan(draw, (key, beta), length=draws)

    return chain


def blackjax(X, y, sampler, control_variates=False, reference=None):
    """With the sampling book's settings, or with ``reference`` the best of a grid of steps."""
    import blackjax
    import jax

    from jax import numpy as jnp

    start, n = time.perf_counter(), len(y)
    data = jnp.asarray(X), jnp.asarray(y)

    def logprior(beta):
        return -0.5 * beta @ beta

    def loglikelihood(beta, row):
        x, outcome = row
        return outcome * (x @ beta) - jnp.logaddexp(0.0, x @ beta)

    gradient = blackjax.sgmcmc.gradients.grad_estimator(logprior, loglikelihood, n)
    position = jax.random.normal(jax.random.key(2), (CHAINS, UNKNOWNS))
    if control_variates or reference is not None:
        estimator = blackjax.sgmcmc.gradients.logdensity_estimator(logprior, loglikelihood, n)
        mode = mode_of(lambda beta: estimator(beta, data))
        position = jnp.tile(mode, (CHAINS, 1))
    if control_variates:
        gradient = blackjax.sgmcmc.gradients.control_variates(gradient, jnp.asarray(mode), data)
    chain = scanned(getattr(blackjax, sampler)(gradient).step, n)
    inner = {"sgld": 1, "sghmc": 10}[sampler]
    thin = GRADIENTS_PER_DRAW // inner

    def compiled(draws, thin):
        def chains(keys, beta, data, step_size):
            return jax.vmap(lambda k, b: chain(k, b, data, step_size, draws, thin))(keys, beta)

        return jax.jit(chains).lower(keys, position, data, 1.0).compile()

    keys = jax.random.split(jax.random.key(1), CHAINS)
    warmup = n // BOOK_BATCH * 20 if reference is None else GRID_WARMUP // inner
    warm, sample = compiled(1, warmup), compiled(DRAWS, thin)
    setup = time.perf_counter() - start

    def run(step_size):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(warm(keys, position, data, step_size))
        tuned = time.perf_counter()
        _, draws = jax.block_until_ready(sample(*state, data, step_size))
        end = time.perf_counter()
        seconds = {"setup": setup, "sampling": end - start, "drawing": end - tuned}
        return np.asarray(draws), {**seconds, "step_size": step_size}

    book, power = book_step(sampler, n)
    if reference is None:
        return run(book)
    runs = [run(step_size) for step_size in (book, *((c / n) ** power for c in GRID))]
    return min(runs, key=lambda r: worst_error(r[0], reference))


def worst_error(draws, reference):
    """The largest error of a mean, in sds, or of a log sd."""
    if not np.isfinite(draws).all():
        return np.inf
    flat = draws.reshape(-1, UNKNOWNS)
    means = (flat.mean(0) - reference["mean"]) / reference["sd"]
    return max(np.abs(means).max(), np.abs(np.log(flat.std(0) / reference["sd"])).max())


def ours(X, y, method, batch_size):
    import pymc as pm

    import pymc_sghmc

    times = defaultdict(list)  # of draws by chain, those of tuning under None

    def watch(trace, draw):
        times[None if draw.tuning else draw.chain].append(time.perf_counter())

    start = time.perf_counter()
    with full_model(X, y):
        idata = pm.sample(
            DRAWS,
            tune=TUNE,
            chains=CHAINS,
            cores=CORES,
            step=getattr(pymc_sghmc, method)(batch_size=batch_size),
            random_seed=1,
            progressbar=False,
            callback=watch,
            compute_convergence_checks=False,
        )
    seconds = time.perf_counter() - start
    sampling = float(idata.posterior.attrs["sampling_time"])
    drawing = sum(when[-1] - when[0] for chain, when in times.items() if chain is not None)
    timing = {"setup": seconds - sampling, "sampling": sampling, "drawing": drawing / CORES}
    return draws_of(idata), timing


METHODS = {
    "nutpie": ("NUTS (nutpie), all rows", nutpie),
    "advi": ("ADVI on pm.Minibatch, 10,000 iterations", advi),
    "advi-60000": ("ADVI on pm.Minibatch, 60,000 iterations", advi_60000),
    "hmcecs": ("HMCECS (NumPyro), Taylor proxy", hmcecs),
    "blackjax-sgld": ("SGLD (BlackJAX)", "sgld"),
    "blackjax-sghmc": ("SGHMC (BlackJAX)", "sghmc"),
    "blackjax-sgld-cv": ("SGLD (BlackJAX), control variates", "sgld"),
    "blackjax-sghmc-cv": ("SGHMC (BlackJAX), control variates", "sghmc"),
    "blackjax-sgld-best": ("SGLD (BlackJAX), best step¹", "sgld"),
    "blackjax-sghmc-best": ("SGHMC (BlackJAX), best step¹", "sghmc"),
    "blackjax-sgld-cv-best": ("SGLD (BlackJAX), control variates, best step¹", "sgld"),
    "blackjax-sghmc-cv-best": ("SGHMC (BlackJAX), control variates, best step¹", "sghmc"),
    "sgld": ("SGLD(batch_size=500)", "SGLD"),
    "sghmc": ("SGHMC(batch_size=500)", "SGHMC"),
    "sghmc-auto": ('SGHMC(batch_size="auto")', "SGHMC"),
}


def run(name, X, y, reference, limit, nutpie_draws):
    _, method = METHODS[name]
    if name == "nutpie":
        return nutpie(X, y, reference=reference, limit=limit, nutpie_draws=nutpie_draws)
    if name.startswith("blackjax"):
        best = reference if name.endswith("-best") else None
        return blackjax(X, y, method, control_variates="-cv" in name, reference=best)
    if isinstance(method, str):
        batch_size = "auto" if name.endswith("-auto") else BATCH
        return ours(X, y, method, batch_size)
    return method(X, y)


def versions():
    found = {"python": platform.python_version()}
    for package in VERSIONS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--nutpie-draws", type=int, default=500)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.CRITICAL)
    X, y = rows(args.n)
    with np.load(args.reference) as file:
        reference = dict(file)
    report = {"versions": versions()}
    try:
        draws, seconds = run(args.method, X, y, reference, args.limit, args.nutpie_draws)
        np.save(args.out.with_suffix(".npy"), draws)
        report.update(seconds)
    except Exception as error:  # A tool that is missing or refuses is a row of its own.
        report["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    args.out.write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # An abandoned sampler may be deep in a draw that nothing interrupts.


if __name__ == "__main__":
    main()
