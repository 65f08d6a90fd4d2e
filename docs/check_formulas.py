"""Check every formula and figure of the pages against the exact laws of ``tests/stationary.py``.

Run ``python docs/check_formulas.py``. It needs no seed: on a Gaussian each sampler is a linear map.
"""

import sys

from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from closed_forms import inflation
from stationary import baoab_map, sghmc_map, sgld_map, stationary_covariance

from pymc_sghmc.tuning.budget import WIDER, critical_friction

ONE = np.eye(1)


def law(A, Q):
    """Stationary covariance, and steps per effective draw of the mean of θ."""
    S = stationary_covariance(A, Q)
    sums = np.linalg.solve(np.eye(len(A)) - A, S)
    return S, (2 * sums[0, 0] - S[0, 0]) / S[0, 0]


def sghmc(h=1.0, V=0.0, T=1.0, **settings):
    """Return the law of SGHMC on N(0, 1/h)."""
    return law(*sghmc_map(h * ONE, V * ONE, T=T, **settings))


def baoab(h=1.0, V=0.0, T=1.0, **settings):
    """Return the law of BAOAB on N(0, 1/h)."""
    return law(*baoab_map(h * ONE, V * ONE, T=T, **settings))


def check_baoab(rng):
    """Compare the formulas of BAOAB with its law."""
    h, p = np.exp(rng.normal(size=2))
    V, T = np.exp(2 * rng.normal()), rng.uniform(0.1, 3)
    alpha = rng.uniform(0.01, 1)
    beta_hat = rng.uniform(0, alpha)
    eta = rng.uniform(0.001, 0.99) * 4 / h  # ηM⁻¹; η itself is eta / p
    settings = {"eta": eta / p, "alpha": alpha, "P": p * ONE}
    S, steps = baoab(h, V, T, beta_hat=beta_hat, **settings)
    heat = T * (1 - beta_hat * (2 - alpha) / (2 * alpha))
    heat += eta * V * (2 - alpha) / (alpha * (4 - eta * h))
    np.testing.assert_allclose(S[0, 0], heat / h, rtol=1e-9)
    kinetic = S[1, 1] / eta
    injected = (1 - alpha / 4) * (alpha - (1 - alpha / 2) * beta_hat) * T
    np.testing.assert_allclose(S[0, 0] * h, (1 - alpha / 2) ** 2 * kinetic + injected, rtol=1e-9)
    _, steps = baoab(h, 0.0, T, **settings)
    np.testing.assert_allclose(steps, 4 * alpha / ((2 - alpha) * eta * h), rtol=1e-9)


def check_inflation(rng):
    """Compare the inflation of variances with the laws read off the rules."""
    h, V, alpha = np.exp(rng.normal()), np.exp(2 * rng.normal()), rng.uniform(0.01, 1)
    eta = rng.uniform(0.001, 0.45) * 4 / h
    for integrator, exact in (("euler", sghmc), ("baoab", baoab), ("sgld", None)):
        eta_ = eta * (1 if integrator == "baoab" else 0.5)
        if exact is None:
            S, _ = law(*sgld_map(h * ONE, V * ONE, eta=eta_))
        else:
            S, _ = exact(h, V, eta=eta_, alpha=alpha)
        predicted = inflation(integrator, eta_, alpha, V, h)
        np.testing.assert_allclose(S[0, 0] * h - 1, predicted, rtol=1e-8, atol=1e-10)


def check_sghmc(rng):
    """Compare the formulas of SGHMC with its law."""
    h, p = np.exp(rng.normal(size=2))
    V, T = np.exp(2 * rng.normal()), rng.uniform(0.1, 3)
    alpha = rng.uniform(0.01, 1)
    beta_hat = rng.uniform(0, alpha)
    eta = rng.uniform(0.001, 0.9) * (4 - 2 * alpha) / h  # ηM⁻¹; η itself is eta / p
    S, steps = sghmc(h, V, T, eta=eta / p, alpha=alpha, beta_hat=beta_hat, P=p * ONE)
    heat = T * (1 - beta_hat / alpha) + eta * V / (2 * alpha)
    variance = heat / h / (1 - eta * h / (4 - 2 * alpha))
    np.testing.assert_allclose(S[0, 0], variance, rtol=1e-10)
    np.testing.assert_allclose(S[1, 1], 2 * eta * h / (2 - alpha) * variance, rtol=1e-10)
    np.testing.assert_allclose(
        steps, 2 * alpha / (eta * h) * (1 - eta * h / (4 - 2 * alpha)), rtol=1e-9
    )


def check_sgld(rng):
    """Compare the formulas of SGLD with its law."""
    h, V, T = np.exp(rng.normal()), np.exp(2 * rng.normal()), rng.uniform(0.1, 3)
    eta = rng.uniform(0.001, 0.99) * 2 / h
    S, steps = law(*sgld_map(h * ONE, V * ONE, eta=eta, T=T))
    np.testing.assert_allclose(S[0, 0], (T + eta * V / 2) / h / (1 - eta * h / 2), rtol=1e-10)
    np.testing.assert_allclose(steps, 2 / (eta * h) * (1 - eta * h / 2), rtol=1e-9)


def check_temperatures(rng, d=3):
    """Kinetic and configurational temperature, for matrices H, V and M⁻¹ that share no axes."""
    H, V, P = (a @ a.T + 0.3 * np.eye(d) for a in rng.normal(size=(3, d, d)))
    alpha, T = rng.uniform(0.05, 1), rng.uniform(0.2, 3)
    eta = rng.uniform(0.01, 0.5) / np.linalg.eigvals(P @ H).real.max()
    settings = {"eta": eta, "alpha": alpha, "beta_hat": rng.uniform(0, alpha), "T": T, "P": P}
    S = stationary_covariance(*sghmc_map(H, 5 * V, **settings))
    configurational = np.trace(H @ S[:d, :d]) / d
    kinetic = np.trace(np.linalg.solve(P, S[d:, d:])) / (d * eta)
    np.testing.assert_allclose(kinetic * (1 - alpha / 2), configurational, rtol=1e-10)
    S = stationary_covariance(*baoab_map(H, 5 * V, **settings))
    configurational = np.trace(H @ S[:d, :d]) / d
    kinetic = np.trace(np.linalg.solve(P, S[d:, d:])) / (d * eta)
    injected = (1 - alpha / 4) * (alpha - (1 - alpha / 2) * settings["beta_hat"]) * T
    np.testing.assert_allclose(
        (1 - alpha / 2) ** 2 * kinetic + injected, configurational, rtol=1e-9
    )


def check_stability():
    """Compare the largest stable step sizes with eigenvalues of the maps."""
    for alpha in (0.05, 0.5, 1.0):
        for factor, stable in ((0.999, True), (1.001, False)):
            A, _ = sghmc_map(ONE, 0 * ONE, eta=factor * (4 - 2 * alpha), alpha=alpha)
            assert (np.abs(np.linalg.eigvals(A)).max() < 1) == stable
            A, _ = baoab_map(ONE, 0 * ONE, eta=factor * 4, alpha=alpha)
            assert (np.abs(np.linalg.eigvals(A)).max() < 1) == stable


def print_figures_of_sghmc():
    """Print the figures of the docs on SGHMC, on its redrawn momentum and on SGLD."""
    print("SGHMC on N(0, 1): η, α, V, β̂ -> variance, kinetic temperature")
    for eta, alpha, V, beta_hat in (
        (0.01, 0.1, 0, 0),
        (0.01, 0.1, 4, 0),
        (0.01, 0.1, 4, 0.02),
        (0.1, 0.1, 1, 0),
    ):
        S, _ = sghmc(V=V, eta=eta, alpha=alpha, beta_hat=beta_hat)
        print(f"  {eta}, {alpha}, {V}, {beta_hat} -> {S[0, 0]:.4f}, {S[1, 1] / eta:.4f}")

    print("order of the bias, α = 1.2 ε: ε -> variance − 1, ε²/4")
    for e in (0.4, 0.2, 0.1, 0.05):
        S, _ = sghmc(eta=e**2, alpha=1.2 * e)
        print(f"  {e} -> {S[0, 0] - 1:.5f}, {e**2 / 4:.5f}")

    print("β̂ = ½ηV at η = 0.05, α = 0.4, V = 4: T -> variance over that of the exact gradient")
    for T in (0.5, 1.0, 2.0):
        exact, _ = sghmc(T=T, eta=0.05, alpha=0.4)
        S, _ = sghmc(V=4, T=T, eta=0.05, alpha=0.4, beta_hat=0.1)
        print(f"  {T} -> {S[0, 0] / exact[0, 0]:.3f}, formula {1 + 0.25 * (1 - T) / T:.3f}")

    print("momentum redrawn every k steps, η = 0.01: k -> variance of eq. 15 at α = 0.1 and 0.5")
    print("  and in the limit of small η and α, beside k/(k − 1)")
    for k in (2, 3, 5, 10, 20, 50, 100):
        v = [
            sghmc(eta=eta, alpha=alpha, redraw=k, n_steps=k)[0][0, 0]
            for eta, alpha in ((0.01, 0.1), (0.01, 0.5), (1e-8, 1e-5))
        ]
        S, _ = baoab(eta=0.01, alpha=0.1, redraw=k, n_steps=k)
        print(
            f"  {k} -> {v[0]:.3f}, {v[1]:.3f}; limit {v[2]:.3f}, {k / (k - 1):.3f}; "
            f"BAOAB, α = 0.1: {S[0, 0]:.3f}"
        )

    print("settling: η, α -> steps by the largest eigenvalue, α/η, 2/α")
    for eta, alpha in ((0.01, 0.5), (0.001, 0.1), (0.01, 0.1), (0.1, 0.1)):
        A, _ = sghmc_map(ONE, 0 * ONE, eta=eta, alpha=alpha)
        steps = -1 / np.log(np.abs(np.linalg.eigvals(A)).max())
        print(f"  {eta}, {alpha} -> {steps:.1f}, {alpha / eta:.0f}, {2 / alpha:.0f}")

    print("plain minibatches, V = N/n = 40: variance, steps and passes per effective draw")
    for eta, alpha in ((0.00125, 0.5), (0.0125, 0.5)):
        S, steps = sghmc(V=40, eta=eta, alpha=alpha)
        print(f"  SGHMC {eta}, {alpha}: {S[0, 0]:.3f}, {steps:.0f}, {steps / 40:.1f}")
        S, steps = law(*sgld_map(ONE, 40 * ONE, eta=eta / alpha))
        print(f"  SGLD {eta / alpha}: {S[0, 0]:.3f}, {steps:.0f}, {steps / 40:.1f}")

    print("no gradient noise: η -> variance of SGHMC at α = 0.5, of SGLD, of SGLD at η/α")
    for eta in (0.001, 0.01, 0.1):
        S, _ = sghmc(eta=eta, alpha=0.5)
        R, _ = law(*sgld_map(ONE, 0 * ONE, eta=eta))
        same_speed, _ = law(*sgld_map(ONE, 0 * ONE, eta=eta / 0.5))
        print(f"  {eta} -> {S[0, 0]:.4f}, {R[0, 0]:.4f}, {same_speed[0, 0]:.4f}")


def print_figures_of_baoab():
    """Print the figures of the docs on BAOAB, on critical friction and on budgets."""
    print("BAOAB on N(0, 1): η, α, V, β̂ -> variance, kinetic temperature, steps per effective draw")
    critical = critical_friction(0.25)
    for eta, alpha, V, beta_hat in (
        (0.01, 0.1, 0, 0),
        (0.01, 0.1, 4, 0),
        (0.01, 0.1, 4, 0.02),
        (0.25, critical, 0, 0),
        (0.25, critical, 1, 0),
        (0.25, critical, 1, 0.125),
    ):
        S, steps = baoab(V=V, eta=eta, alpha=alpha, beta_hat=beta_hat)
        print(
            f"  {eta}, {alpha:.3f}, {V}, {beta_hat} -> {S[0, 0]:.4f}, {S[1, 1] / eta:.4f}, "
            f"{steps:.1f}"
        )

    print("critical friction: η -> variance of eq. 15 and of BAOAB, BAOAB's steps")
    for eta in (0.01, 0.04, 0.1, 0.25, 1.0):
        alpha = critical_friction(eta)
        S, _ = sghmc(eta=eta, alpha=alpha)
        R, steps = baoab(eta=eta, alpha=alpha)
        print(f"  {eta}, α = {alpha:.3f} -> {S[0, 0]:.4f}, {R[0, 0]:.4f}, {steps:.1f}")

    print("BAOAB, η = 0.25: α -> steps per effective draw in a direction, and in one twice as wide")
    for curvature in (1.0, 1 / WIDER):
        alpha = critical_friction(0.25, curvature)
        steps = [baoab(eta=eta, alpha=alpha)[1] for eta in (0.25, 0.25 / 4)]
        print(f"  {alpha:.3f} -> {steps[0]:.1f}, {steps[1]:.1f}")

    print("SGLD at the bias budget of 5 %, no gradient noise: η, steps per effective draw")
    eta = 0.1 / 1.05
    S, steps = law(*sgld_map(ONE, 0 * ONE, eta=eta))
    print(f"  {eta:.4f}: {S[0, 0]:.4f}, {steps:.1f}")

    e, C = 0.1, 1.0
    A, Q = np.array([[1, e], [-e, 1 - e * C]]), np.diag([0, 2 * e * C])
    exact, _ = sghmc(eta=e**2, alpha=e * C)
    print(
        f"gradient at the old θ, ε = 0.1, C = 1: {stationary_covariance(A, Q)[0, 0]:.3f}, "
        f"at the new θ: {exact[0, 0]:.3f}"
    )


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    for _ in range(200):
        check_sghmc(rng)
        check_baoab(rng)
        check_sgld(rng)
        check_inflation(rng)
        check_temperatures(rng)
    check_stability()
    print("All formulas hold.")
    print_figures_of_sghmc()
    print_figures_of_baoab()
