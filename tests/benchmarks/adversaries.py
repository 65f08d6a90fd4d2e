"""Second-order control variates on models that are made to break them: are chains lost silently?

    python tests/benchmarks/adversaries.py [--name cauchy few_100 ...] [--seeds 100] [--inner 100000]
        [--set gradient=control_variates ...] [--markdown]

A step, ``SGHMC(batch_size="auto", gradient="second_order")`` unless ``--set`` says otherwise, is
built once a model and makes chains with the seeds 0, 1, 2, …: 300 tuning draws of 10 inner steps,
then ``--inner`` inner steps, 50 a draw. Models, which are synthetic, and the importance sampling
that they are held against are in tests/model_collection/hard.py; what "lost" means is in tests/lost_chains.py.
"cauchy" is refused when its step is built; the same with rows a hundredth as long isn't.

Prints one line of JSON and with ``--markdown`` a table; each model goes to standard error as soon as
it is there. Means and sds are on the unconstrained scale and in units of the posterior's sds.
"Pooled" is the largest error over the unknowns of the mean over all chains, with the standard error
that chains among each other and the reference have; "by chain" the largest in any chain, and the
largest in units of the chain's own Monte Carlo error. "Told" counts chains with a warning after
tuning, an error, or a log line, "while tuning" those that were told to go on with first order, and
"built" says whether building the step logged a warning, for all chains; a lost chain with none of
these is lost silently, whatever the thermometer says at the end of a run of four chains, which is
"warned" in the JSON. Lost after nothing but the words while tuning is counted by itself.
T_conf is the mean over chains beside tr(P⁻¹Σ)/d, which is what it should be where the posterior,
of covariance P, is a Gaussian; both and the verdict of `check_bias` for the first four chains stand
together. V is the variance of the gradient in units of the posterior's curvature with the rows that
a chain begins with, one and two sds from the centre, as the first set-up found it.
"""

# ruff: noqa: I001  (untouched sets the environment before NumPy is imported)
import argparse
import time
import warnings

from untouched import rounded, setting

import numpy as np
import report

from model_collection import models_of
from model_collection.hard import posterior
from lost_chains import as_inference_data, logged, lost, run_chain, trace, worst

from pymc_sghmc import SGHMC
from pymc_sghmc.diagnostics import (
    check_bias,
    configurational_temperature,
    temperature_warnings,
)

MODELS = models_of("hard")
FEW = 4  # chains that a user would have
DEFAULTS = {"batch_size": "auto", "gradient": "second_order"}


def run(name, settings, n_seeds, n_inner):
    """One row: all chains on one model."""
    hard, began = MODELS[name].make(), time.perf_counter()
    row = {"N": hard.n_rows, "d": hard.d}
    try:
        with logged() as log, hard.model:
            step = SGHMC(**settings)
    except ValueError as error:
        return row | {"refused": str(error).split(". ")[0]}
    built = time.perf_counter() - began
    right, start = posterior(hard), hard.model.initial_point()
    reference = [(right.error / right.sd).max(), right.sd_error.max(), right.effective]
    began = time.perf_counter()
    chains = [run_chain(step, start, seed, n_inner) for seed in range(n_seeds)]
    row |= {
        "seconds": rounded(built, (time.perf_counter() - began) / n_seeds),
        "reference_errors": rounded(*reference),
        "told_when_built": log,
        **noise_of(step, chains),
        **judged(chains, right, log),
    }
    few = [chain for chain in chains if chain.draws.size and not chain.failed][:FEW]
    return row if len(few) < FEW else row | {"few": few_chains(hard, few, right)}


def noise_of(step, chains):
    """What the first set-up found of second order, with the rows that chains had."""
    step.begin_chain(np.random.default_rng(0))
    tuning, setup = step.tuner.prepare(), step.tuner.setup
    row = {"centre_is_mode": setup.fit.is_mode, "limit": setup.limits.second_order}
    if tuning.order == 2:
        V = float(tuning.noise.max())
        far = setup.noise.second_order_far * V / float(setup.noise.second_order.max() or 1.0)
        row["V"] = rounded(V, far)
    # with the rows it was measured with
    row["far_at_first"] = rounded(setup.noise.second_order_far)[0]
    row["orders"] = counted(chain.order for chain in chains)
    row["rows"] = counted(chain.rows for chain in chains)
    row["learning_rate"] = rounded(*np.quantile([c.learning_rate for c in chains], [0, 1]))
    return row


def judged(chains, right, log):
    found = [worst(chain, right) for chain in chains]
    is_lost = [lost(errors) for errors in found]
    of_lost = [
        one(chain, errors) for chain, errors, yes in zip(chains, found, is_lost, strict=True) if yes
    ]
    texts = dict.fromkeys(text for c in chains for text in (*c.told_while_tuning, *c.told))
    row = {
        "chains": len(chains),
        "told_while_tuning": sum(bool(chain.told_while_tuning) for chain in chains),
        "told": sum(bool(chain.told) for chain in chains),
        "failed": sum(chain.failed for chain in chains),
        "lost": len(of_lost),
        "lost_but_for_words_while_tuning": sum(
            yes and not (log or chain.told) for chain, yes in zip(chains, is_lost, strict=True)
        ),
        "silently_lost": sum(
            yes and not (log or chain.told or chain.told_while_tuning)
            for chain, yes in zip(chains, is_lost, strict=True)
        ),
        "lost_chains": of_lost[:20],
        "texts": [" ".join(text.split()) for text in texts],
        "radius": rounded(np.nanmax([chain.radius for chain in chains]))[0],
    }
    found = [errors for errors in found if errors]
    if not found:
        return row
    by = {key: np.array([errors[key] for errors in found]) for key in found[0]}  # (chain, d)
    n = len(found)
    mean, variance = by["mean"].mean(axis=0), np.mean(by["sd"] ** 2 + by["mean"] ** 2, axis=0)
    pooled_mean = pooled(mean, by["mean"].std(axis=0, ddof=1) / n**0.5, right.error / right.sd)
    spread = (by["sd"] ** 2 + by["mean"] ** 2).std(axis=0, ddof=1) / n**0.5 / 2
    pooled_sd = pooled(np.sqrt(variance) - 1, spread, right.sd_error)
    kept = [chain for chain, errors in zip(chains, found, strict=True) if errors]
    heat = [chain.temperatures.mean() for chain in kept]
    traces = [trace(chain.draws, right) for chain in kept]
    return row | {
        "pooled_mean": pooled_mean,
        "pooled_sd": pooled_sd,
        "chain_mean": rounded(np.abs(by["mean"]).max(), (np.abs(by["mean"]) / by["mean_mc"]).max()),
        "chain_sd": rounded(
            by["sd"].min(), by["sd"].max(), (np.abs(by["sd"] - 1) / by["sd_mc"]).max()
        ),
        "temperature": rounded(np.mean(heat), np.std(heat, ddof=1) / n**0.5, *extremes(heat)),
        "trace": rounded(np.mean(traces), np.std(traces, ddof=1) / n**0.5, *extremes(traces)),
        "correlation": rounded(np.corrcoef(heat, traces)[0, 1])[0],
    }


def one(chain, errors):
    """What there is to know of a lost chain."""
    row = {
        "seed": chain.seed,
        "order": chain.order,
        "rows": chain.rows,
        "learning_rate": chain.learning_rate,
        "told_while_tuning": bool(chain.told_while_tuning),
        "told": [text[:80] for text in chain.told],
        "radius": rounded(chain.radius)[0],
        "temperature": rounded(np.mean(chain.temperatures) if chain.draws.size else np.nan)[0],
    }
    if errors:
        i, j = np.argmax(np.abs(errors["mean"])), np.argmax(np.abs(np.log(errors["sd"])))
        row["mean"] = rounded(errors["mean"][i], errors["mean_mc"][i])
        row["sd"] = rounded(errors["sd"][j], errors["sd_mc"][j])
    return row


def few_chains(hard, chains, right):
    """What a user with four of the chains would be told by the thermometer and by `check_bias`."""
    idata = as_inference_data(hard.model, chains)
    [mean], [error] = configurational_temperature(idata)
    draws = np.concatenate([chain.draws for chain in chains])
    n_draws = 10 * hard.d + 200
    with logged():
        report = check_bias(
            idata, hard.model, n_draws=n_draws, compile_kwargs={"mode": "FAST_COMPILE"}
        )
    return {
        "temperature": rounded(mean, error),
        "trace": rounded(trace(draws, right))[0],
        "warned": [warning.message for warning in temperature_warnings(idata)],
        "check_bias": "biased" if report.biased else "no bias seen",
    }


def pooled(error, mc, reference):
    mc = np.hypot(mc, reference)
    i, j = int(np.argmax(np.abs(error))), int(np.argmax(np.abs(error) / mc))
    return rounded(error[i], mc[i], error[j] / mc[j])


def extremes(values):
    return np.min(values), np.max(values)


def counted(values):
    values, counts = np.unique([str(value) for value in values], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--inner", type=int, default=100_000)
    parser.add_argument("--set", nargs="+", default=[], type=setting, metavar="KEY=VALUE")
    parser.add_argument("--markdown", action="store_true", help="print a table as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    settings, runs = DEFAULTS | dict(args.set), {}
    machine = report.machine()
    for name in args.name:
        runs[name] = run(name, settings, args.seeds, args.inner)
        report.progress(name, runs[name])
    result = {
        "benchmark": "adversaries",
        "arguments": settings,
        "seeds": args.seeds,
        "inner": args.inner,
        "runs": runs,
        **report.closing(machine, "numpy", "pymc", "pytensor", "arviz", "numba", "pymc-sghmc"),
    }
    report.print_json(result)
    if args.markdown:
        print(f"\n{markdown(result)}")


def markdown(result):
    titles = "N, d, rows, η, order at the end, V at 1 and 2 sds, built, while tuning, told, ended, lost, "
    titles += "silently, pooled mean, pooled sd − 1, mean by chain, in own errors, sd by chain, "
    titles += "T_conf, trace, four chains: T_conf, trace, check_bias"
    titles = ["", *titles.split(", ")]
    lines = [report.markdown_table(titles, [])]
    for name, row in result["runs"].items():
        cells = [name, f"{row['N']:,}", row["d"]]
        if "refused" in row:
            cells += [f"refused: {row['refused']}", *[""] * (len(titles) - 4)]
        else:
            few = row.get("few", {"temperature": [], "trace": "", "check_bias": ""})
            cells += [words(row["rows"]), span(row["learning_rate"]), words(row["orders"])]
            cells += [", ".join(map(str, row.get("V", ["", ""])))]
            cells += ["warned" if row["told_when_built"] else "", row["told_while_tuning"]]
            cells += [row["told"], row["failed"], row["lost"], row["silently_lost"]]
            for key in ("pooled_mean", "pooled_sd"):
                error, mc, _ = row.get(key, [np.nan] * 3)
                cells.append(f"{error:+.3f} ± {mc:.3f}")
            cells += row.get("chain_mean", ["", ""])
            cells += [span(row.get("chain_sd", [])[:2])]
            for key in ("temperature", "trace"):
                cells.append(plus_minus(row.get(key, [])[:2]))
            cells += [plus_minus(few["temperature"]), few["trace"], few["check_bias"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    settings = ", ".join(f"{key}={value}" for key, value in result["arguments"].items())
    lines += [
        "",
        f"SGHMC({settings}), {result['seeds']} chains of {result['inner']:,} inner steps. {versions}.",
    ]
    return "\n".join(lines)


def words(counts):
    return (
        ", ".join(f"{key}: {n}" for key, n in counts.items())
        if len(counts) > 1
        else next(iter(counts))
    )


def span(pair):
    return " to ".join(map(str, pair)) if len(set(pair)) > 1 else str(*pair[:1])


def plus_minus(pair):
    return " ± ".join(map(str, pair))


if __name__ == "__main__":
    main()
