"""Three traps of Algorithm 2 of Fu, Luo & Zhang (2016), measured: `docs/explanation/qnhmc.md` shows the result.

1. The accept line as printed, min{1, exp(E₁ − E₀)}.
2. M = I with C = H⁻¹: inverse mass H⁻², which inverts the condition number.
3. C that follows the chain for ever.

No PyMC: the package's `update` on NumPy densities. Run as

    python tests/benchmarks/qnhmc_traps.py --markdown
"""

import argparse
import math

from collections import deque

import arviz as az
import numpy as np
import report

from pymc_sghmc.exact import curvature, qnhmc
from pymc_sghmc.exact.quasi_newton import Dense, identity

QUARTIC = 2 * math.gamma(3 / 4) / math.gamma(1 / 4)  # E[x²] of exp(−x⁴/4)


def quartic(x):
    return float(-(x**4).sum() / 4), -(x**3)


def student(x):
    return float(-3 * np.log1p(x**2 / 5).sum()), -6 * x / (5 + x**2)


def gaussian(precision):
    return lambda x: (float(-x @ precision @ x / 2), -precision @ x)


def chain(density, d, draws, rng, *, step_size, n_steps, C=None, M=None, adapt=False):
    """Draws; ``adapt``: C follows the trajectories as in the paper."""
    state = qnhmc.init(np.full(d, 0.5), density)
    learnt = curvature.begin(d, None, for_ever=True)
    kept = np.empty((draws, d))
    for t in range(draws):
        path = deque([(state.position, state.gradient)])
        inverse = learnt.inverse_hessian if adapt else C
        state, info, _ = qnhmc.update(
            state,
            density,
            step_size,
            rng,
            inverse_hessian=inverse,
            mass=M or inverse,
            n_steps=int(rng.integers(n_steps[0], n_steps[1] + 1)),
            path=path,
        )
        if adapt:
            learnt = curvature.follow(learnt, path, info["accepted"])
        kept[t] = state.position
    return kept


def second_moment(draws):
    """E[x²] and its Monte Carlo standard error; None where the chain stands still."""
    squares = np.square(draws[len(draws) // 10 :, 0])
    if np.ptp(squares) == 0:
        return float(squares[0]), None
    error = squares.std() / math.sqrt(float(np.squeeze(az.ess(squares[None], method="mean"))))
    return float(squares.mean()), error


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    machine = report.machine()
    rng, draws, rows = np.random.default_rng(arguments.seed), arguments.draws, []

    # 1. The printed sign is the mended one on the reversed energies.
    mended, metropolis = qnhmc.metropolis, qnhmc.metropolis
    wide = Dense.of(np.full((1, 1), 4.0))
    for name, sign in (("exp(E₀ − E₁)", mended), ("exp(E₁ − E₀), as printed", None)):
        qnhmc.metropolis = sign or (lambda E0, E1, rng: metropolis(E1, E0, rng))
        settings = {"step_size": 0.5, "n_steps": (1, 3), "C": wide}
        value, error = second_moment(chain(quartic, 1, draws, rng, **settings))
        rows.append(("accept " + name, "exp(−x⁴/4)", "E[x²]", QUARTIC, value, error))
    qnhmc.metropolis = mended

    # 2. Condition number 10⁴, d = 20, C the exact inverse Hessian.
    d, condition = 20, 1e4
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((d, d)))[0]
    precision = (rotation * np.geomspace(1, condition, d)) @ rotation.T
    exact = Dense.of(np.linalg.inv(precision))
    one = identity(d, dense=False)
    # Stable steps end at 2/√(largest curvature × inverse mass): half of that, and a quarter.
    masses = (
        ("HMC: C = I", one, one, condition),
        ("C = H⁻¹, M = I", exact, one, 1.0),
        ("C = H⁻¹, M = C", exact, None, 1.0),
    )
    for name, C, M, largest in masses:
        ess = []
        for share in (0.25, 0.5):
            settings = {"step_size": share * 2 / math.sqrt(largest), "n_steps": (5, 15)}
            kept = chain(gaussian(precision), d, 4000, rng, C=C, M=M, **settings)
            along = kept @ rotation
            ess.append(min(float(np.squeeze(az.ess(along[None, :, i]))) for i in range(d)))
        rows.append((name, f"Gaussian, κ = {condition:.0e}", "min-ESS of 4,000", 4000, max(ess), 0))

    # 3. Adaptation for ever against the same C at rest.
    for label, density, truth in (("exp(−x⁴/4)", quartic, QUARTIC), ("Student-t₅", student, 5 / 3)):
        for mass in (identity(1, dense=False), None):
            name = "M = C" if mass is None else "M = I"
            for adapt, settings in (
                ("always", {"step_size": 0.3}),
                ("frozen", {"step_size": 0.3, "C": Dense.of(np.full((1, 1), truth))}),
            ):
                kept = chain(
                    density,
                    1,
                    draws,
                    rng,
                    n_steps=(5, 5),
                    M=mass,
                    adapt=adapt == "always",
                    **settings,
                )
                rows.append((f"{adapt}, {name}", label, "E[x²]", truth, *second_moment(kept)))

    keys = ("what", "target", "quantity", "exact", "value", "error")
    table = [dict(zip(keys, row, strict=True)) for row in rows]
    result = {"benchmark": "qnhmc_traps", "rows": table}
    report.print_json(result | report.closing(machine, "numpy", "scipy", "arviz", "pymc-sghmc"))
    if arguments.markdown:
        print("\n| | target | | exact | measured |\n|---|---|---|---:|---:|")
        for what, target, quantity, exact_value, value, error in rows:
            shown = f"{value:.3f} ± {error:.3f}" if error else f"{value:.0f}"
            shown = shown if error is not None else f"{value:.3f}, and stands still"
            print(f"| {what} | {target} | {quantity} | {exact_value:.4g} | {shown} |")


if __name__ == "__main__":
    main()
