"""Groups integrated out: what a million of them cost.

python tests/benchmarks/units.py [--rows 1e5 1e6 1e7] [--gradient second_order control_variates] [--markdown]
python tests/benchmarks/units.py --rows 1e5 --per 3 --large 1e5
python tests/benchmarks/units.py --peer nutpie statsmodels [--rows 1e4 1e5] [--seconds 300]

prints one line of JSON with, for a logistic model of N rows in N/10 groups, made on the fly: seconds and passes of setting up, seconds of
sampling (a chain of 1,000 + 2,000 draws in this process, effects not recorded), microseconds of an inner step, effective draws (the least
over all unknowns but the effects) per inner step and per second, and megabytes of memory at most above the data's and the model's own. ``--large`` gives
the last of the groups so many further rows. ``--rows 0`` is MovieLens, 1,000,209 ratings by 6,040 users, which needs the shared data.

``--peer`` runs others on the same models instead: nutpie's NUTS, non-centred, a chain of 1,000 + 1,000 draws on one core, for so many seconds
at most, which wants an environment of its own, and statsmodels' BinomialBayesMixedGLM, whose posterior is a Gaussian by variational Bayes.
"""

# ruff: noqa: I001  (untouched sets the environment before NumPy is imported)
import argparse
import resource
import time
import warnings

from untouched import data_folder, over_unknowns

import numpy as np
import pymc as pm
import report


def model_of(n, per=10, large=0):
    """A logistic model, six coefficients and random intercepts; true values are the same for each n."""
    x, group, y = parts_of(n, per, large)
    groups = int(group[-1]) + 1
    with pm.Model() as model:
        b, tau = pm.Normal("b", 0, 2, shape=6), pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=groups)
        x, group = pm.Data("x", x), pm.Data("group", group)
        pm.Bernoulli("y", logit_p=x @ b + u[group], observed=pm.Data("y_data", y))
    return model


def parts_of(n, per=10, large=0):
    """Predictors, groups of so many rows, the last with ``large`` more, and outcomes."""
    rng = np.random.default_rng(11)
    group = np.repeat(np.arange(n // per, dtype=np.int32), per)
    group = np.append(group, np.repeat(group[-1], large))
    n = group.size
    x = np.concatenate([np.ones((n, 1)), rng.standard_normal((n, 5))], axis=1)
    u = 0.8 * rng.standard_normal(group[-1] + 1)
    p = 1 / (1 + np.exp(-(x @ [-0.5, 0.5, -0.4, 0.3, -0.2, 0.1] + u[group])))
    return x, group, (rng.random(n) < p).astype(np.int8)


def by_nutpie(n, limit):
    """One row of NUTS."""
    import arviz as az
    import nutpie

    x, group, y = parts_of(n)
    with pm.Model() as model:
        b, tau = pm.Normal("b", 0, 2, shape=6), pm.HalfNormal("tau", 1)
        z = pm.Normal("z", 0, 1, shape=n // 10)
        pm.Bernoulli("y", logit_p=pm.Data("x", x) @ b + (tau * z)[group], observed=y)
    compiled, began = nutpie.compile_pymc_model(model), time.perf_counter()
    sampling = nutpie.sample(
        compiled,
        draws=1000,
        tune=1000,
        chains=1,
        cores=1,
        seed=1,
        progress_bar=False,
        blocking=False,
    )
    try:
        idata = sampling.wait(timeout=limit)
    except TimeoutError:
        return {"seconds": limit, "finished": False}
    seconds = time.perf_counter() - began
    draws = [idata.posterior[key].to_numpy().reshape(1, 1000, -1) for key in ("b", "tau")]
    least = float(over_unknowns(az.ess, np.concatenate(draws, axis=-1)).min())
    tau = draws[1]
    return {
        "seconds": seconds, "finished": True, "least ESS": least, "ESS/s": 2 * least / seconds,
        "tau": float(tau.mean()), "sd": float(tau.std()),
    }  # fmt: skip


def by_statsmodels(n, limit):
    """One row of variational Bayes."""
    from scipy.sparse import csr_matrix
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    x, group, y = parts_of(n)
    of_groups = csr_matrix((np.ones(n), (np.arange(n), group)))
    began = time.perf_counter()
    model = BinomialBayesMixedGLM(y, x, of_groups, np.zeros(n // 10, int), vcp_p=1, fe_p=2)
    found = model.fit_vb()
    tau = np.exp(found.vcp_mean[0])
    return {
        "seconds": time.perf_counter() - began, "finished": True,
        "tau": float(tau), "sd": float(tau * found.vcp_sd[0]),
    }  # fmt: skip


PEERS = {"nutpie": by_nutpie, "statsmodels": by_statsmodels}


def movielens():
    """Whether a film was liked, by how often and how well others rated it: a million ratings by 6,040 users."""
    with np.load(data_folder() / "movielens" / "ml1m.npz") as data:
        user, item, liked = data["user"], data["item"], data["rating"] >= 4
    user, item = (np.unique(ids, return_inverse=True)[1] for ids in (user, item))
    counts, likes = np.bincount(item), np.bincount(item, liked)
    others = (likes[item] - liked + 1) / (counts[item] + 1)  # without the rating itself
    x = np.stack([np.log(counts[item]), np.log(others / (1 - others))], axis=1)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    with pm.Model(coords={"user": range(user.max() + 1)}) as model:
        a, b, tau = pm.Normal("a", 0, 1), pm.Normal("b", 0, 1, shape=2), pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, dims="user")
        x, user = pm.Data("x", x), pm.Data("of_user", user)
        pm.Bernoulli("y", logit_p=a + x @ b + u[user], observed=liked.astype(np.int8))
    return model


def peak():
    """Megabytes, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(model, gradient):
    """One row."""
    import arviz as az

    from pymc_sghmc import SGHMC
    from pymc_sghmc.hierarchy.marginal import marginal_of

    with model:
        names = [rv.name for rv in model.free_RVs if rv.name != "u"]
        own, began = peak(), time.perf_counter()
        step = SGHMC(marginalize="u", batch_size="auto", gradient=gradient, recover=False)
        made = time.perf_counter()
        pm.sample(  # compiles what PyMC compiles for each run
            2, tune=2, chains=1, step=step, progressbar=False, var_names=names, random_seed=1,
            compute_convergence_checks=False,
        )  # fmt: skip
        start = time.perf_counter()
        idata = pm.sample(
            2000, tune=1000, chains=1, step=step, progressbar=False, var_names=names,
            random_seed=1, compute_convergence_checks=False,
        )  # fmt: skip
        seconds = time.perf_counter() - start
    draws = [idata.posterior[key].to_numpy().reshape(1, 2000, -1) for key in names]
    draws = np.concatenate(draws, axis=-1)
    steps = idata.sample_stats["inner_steps"].to_numpy()
    sampling = idata.posterior.attrs.get("sampling_time", seconds)
    least = float(over_unknowns(az.ess, draws).min())
    share = 2000 / 3000  # of the time, for draws after tuning
    return {
        "set-up": made - began, "passes": step.tuner.setup.passes, "sampling": sampling,
        "groups a step": step.tuner.gradient.data.batch_sizes[0],
        "nodes": marginal_of(step.tuner.gradient.density).n_nodes,
        "µs a step": 1e6 * share * sampling / steps.sum(),
        "ESS a step": least / steps.sum(),
        "ESS/s": least / (share * sampling),
        "MB": peak() - own,
        "tau": float(draws[..., -1].mean()), "sd": float(draws[..., -1].std()),
    }  # fmt: skip


def main():
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=float, default=[1e5, 1e6, 1e7])
    parser.add_argument("--gradient", nargs="+", default=["second_order"])
    parser.add_argument("--per", type=int, default=10, help="rows of a group")
    parser.add_argument("--large", type=float, default=0, help="further rows of the last group")
    parser.add_argument("--peer", nargs="+", choices=PEERS, help="run these instead")
    parser.add_argument("--seconds", type=float, default=300.0, help="for nutpie at most")
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, machine = {}, report.machine()
    for n in map(int, args.rows) if args.peer else ():
        for peer in args.peer:
            name = f"{n:,} rows, {peer}"
            rows[name] = PEERS[peer](n, args.seconds)
            report.progress(name, rows[name])
    for n in map(int, args.rows) if not args.peer else ():
        for gradient in args.gradient:
            name = f"{n:,} rows, {gradient}" if n else f"MovieLens, {gradient}"
            model = model_of(n, args.per, int(args.large)) if n else movielens()
            rows[name] = run(model, gradient)
            report.progress(name, rows[name])
    packages = "numpy", "pymc", "pytensor", "numba", "arviz", "pymc-sghmc"
    report.print_json({"benchmark": "units", "rows": rows, **report.closing(machine, *packages)})
    if args.markdown:
        keys = list(next(iter(rows.values())))
        print(report.markdown_table(["", *keys], [[k, *r.values()] for k, r in rows.items()]))


if __name__ == "__main__":
    main()
