"""Inverse Hessians from curvature pairs and draws, against dense formulas; the leapfrog with them."""

import itertools
import tracemalloc

import numpy as np
import pytest

from scipy.linalg import LinAlgError, cholesky, eigvalsh, solve_triangular

from pymc_sghmc.exact import curvature, quasi_newton
from pymc_sghmc.exact.curvature import LEAST_TIME, begin, follow, gather
from pymc_sghmc.exact.leapfrog import leapfrog
from pymc_sghmc.exact.quasi_newton import (
    DAMPING,
    SMALLEST_COSINE,
    CurvaturePair,
    Dense,
    LowRank,
    bfgs,
    guarded,
    identity,
    lbfgs,
    multisecant,
    of_largest_curvatures,
)

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order_of_tests():
    rng.bit_generator.state = np.random.default_rng(1).bit_generator.state


def rotation(d, r=None):
    return np.linalg.qr(rng.standard_normal((d, r or d)))[0]


def spd(d, kappa=100.0):
    root = rotation(d) * np.geomspace(1, kappa**0.5, d)
    return root @ root.T


def columns(function, d):
    return np.column_stack([function(e) for e in np.eye(d)])


def curvature_pairs(d, m):
    """Columns of S and Y, sᵀy > 0, of another quadratic each."""
    S = rng.standard_normal((d, m))
    return S, np.column_stack([spd(d) @ s for s in S.T])


def assert_close(actual, expected, tolerance=1e-9):
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def eq_1(B, s, y):
    eye, sy = np.eye(len(s)), s @ y
    left, right = eye - np.outer(s, y) / sy, eye - np.outer(y, s) / sy
    return left @ B @ right + np.outer(s, s) / sy


@pytest.mark.parametrize("d", [1, 2, 7, 40])
def test_bfgs_is_the_papers_eq_1_and_solves_the_secant_equation(d):
    for s, y in zip(*(matrix.T for matrix in curvature_pairs(d, 20)), strict=True):
        B = bfgs(before := spd(d), s, y)
        assert_close(B, eq_1(before, s, y))
        assert_close(B @ y, s, 1e-8)
        np.testing.assert_array_equal(B, B.T)
        assert eigvalsh(B)[0] > 0


@pytest.mark.parametrize("d", [1, 10, 100])
def test_bfgs_of_conjugate_pairs_is_the_inverse_hessian(d):
    H = spd(d, 1e8)
    L = cholesky(H, lower=True)
    S = solve_triangular(L, rotation(d), lower=True, trans=1)
    Y = H @ S
    B = np.eye(d) * (S[:, 0] @ Y[:, 0]) / (Y[:, 0] @ Y[:, 0])
    for s, y in zip(S.T, Y.T, strict=True):
        B = bfgs(B, s, y)
    np.testing.assert_allclose(L.T @ B @ L, np.eye(d), atol=1e-5)


def trajectory(position, H, C, n_steps):
    largest = eigvalsh(C.factor.T @ H @ C.factor)[-1]
    points = leapfrog(
        position, C.draw(rng.standard_normal(len(H))), -H @ position,
        lambda q: (-q @ H @ q / 2, -H @ q), largest**-0.5, C, C,
    )  # fmt: skip
    return [(position, -H @ position), *((p[0], p[3]) for p in itertools.islice(points, n_steps))]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("d", [1, 10])
def test_trajectories_on_a_gaussian_give_the_inverse_hessian(d, scale):
    H = scale * spd(d, 1e8)
    c, position = begin(d, None, for_ever=False), rng.standard_normal(d) / scale**0.5
    for _ in range(400):
        path = trajectory(position, H, c.inverse_hessian, 10)
        c, position = follow(c, path, accepted=True), path[-1][0]
    assert c.skipped == 0
    L = cholesky(H, lower=True)
    np.testing.assert_allclose(L.T @ c.inverse_hessian.matrix @ L, np.eye(d), atol=1e-4)


def two_loops(diagonal, S, Y, q):
    """Nocedal & Wright (2006), algorithm 7.4."""
    alphas = []
    for s, y in zip(S.T[::-1], Y.T[::-1], strict=True):
        alphas.append(s @ q / (s @ y))
        q = q - alphas[-1] * y
    r = diagonal * q
    for s, y, alpha in zip(S.T, Y.T, alphas[::-1], strict=True):
        r = r + s * (alpha - y @ r / (s @ y))
    return r


@pytest.mark.parametrize(
    ("d", "m"), [(1, 1), (1, 4), (3, 2), (3, 7), (8, 0), (8, 1), (8, 8), (60, 10)]
)
def test_lbfgs_is_bfgs_applied_m_times_and_the_two_loops(d, m):
    diagonal = np.exp(rng.standard_normal(d))
    S, Y = curvature_pairs(d, m) if m else np.empty((2, d, 0))
    B = np.diag(diagonal)
    for s, y in zip(S.T, Y.T, strict=True):
        B = bfgs(B, s, y)
    estimate = lbfgs(diagonal, S, Y)
    assert_close(columns(estimate.product, d), B)
    assert_close(columns(lambda e: two_loops(diagonal, S, Y, e), d), B)
    scales = 10 ** rng.uniform(-8, 8, m)
    badly_scaled = lbfgs(diagonal, scales * S, scales * Y)
    assert_close(columns(badly_scaled.product, d), B)


def dense(d, kappa=1e4):
    return Dense.of(spd(d, kappa))


def low_rank(d, r):
    values = np.geomspace(1e-3, 50, r)
    return LowRank(np.exp(rng.standard_normal(d)), rotation(d, r), values)


def full(matrix):
    """B by its definition."""
    if isinstance(matrix, Dense):
        return matrix.matrix
    scale, Q, values = matrix
    inner = np.eye(scale.size) + Q @ np.diag(values - 1) @ Q.T
    return np.diag(scale) @ inner @ np.diag(scale)


ESTIMATES = {
    "dense-1": dense(1),
    "dense": dense(6),
    "low-rank": low_rank(9, 4),
    "low-rank-full": low_rank(4, 4),
    "low-rank-2": low_rank(2, 1),
    "diagonal": LowRank(np.array([0.1, 2.0, 1.0]), np.empty((3, 0)), np.empty(0)),
    "identity": identity(5, dense=True),
    "identity-low-rank": identity(5, dense=False),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_products_and_factors_are_those_of_the_matrix(name):
    estimate, B = ESTIMATES[name], full(ESTIMATES[name])
    d, inverse = len(B), np.linalg.inv(B)
    F = columns(estimate.draw, d)
    assert_close(columns(estimate.product, d), B, 1e-12)
    assert_close(columns(estimate.inverse_product, d), inverse)
    assert_close(F @ F.T, B, 1e-12)


@pytest.mark.parametrize("estimate", [*ESTIMATES.values(), dense(200)], ids=[*ESTIMATES, "200"])
def test_extremes_of_few_unknowns_are_exact(estimate):
    np.testing.assert_allclose(estimate.extremes(), eigvalsh(full(estimate))[[0, -1]], rtol=1e-9)


@pytest.mark.parametrize("estimate", [dense(300), low_rank(300, 20)], ids=["dense", "low-rank"])
def test_extremes_of_many_unknowns_are_right_within_some_per_cent(estimate):
    np.testing.assert_allclose(estimate.extremes(), eigvalsh(full(estimate))[[0, -1]], rtol=0.05)


@pytest.mark.parametrize("wrong", [-1.0, 0.0, np.nan, np.inf])
def test_what_is_not_positive_definite_is_no_estimate(wrong):
    with pytest.raises(LinAlgError):
        Dense.of(np.diag([1.0, wrong, 2.0]))


def test_limited_memory_makes_nothing_with_d_squared_entries():
    d, m = 5_000, 5
    diagonal, S = np.exp(rng.standard_normal(d)), rng.standard_normal((d, m))
    Y = S * rng.uniform(0.5, 2, (d, 1))
    tracemalloc.start()
    estimate = lbfgs(diagonal, S, Y)
    for name in ("product", "inverse_product", "draw"):
        getattr(estimate, name)(S[:, 0])
    estimate.extremes()
    of_largest_curvatures(lambda x: -x / diagonal, np.zeros(d), np.ones(d), m)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 8 * 2 * m * d  # bytes; d² numbers take 50 times as many


def pair_at(C, along, y_over_s, cosine=1.0):
    """s and y with that angle and ratio of lengths in coordinates in which C is 1."""
    across = np.roll(along, 1) - along * (along @ np.roll(along, 1)) / (along @ along)
    across *= np.linalg.norm(along) / np.linalg.norm(across)
    b = y_over_s * (cosine * along + np.sqrt(1 - cosine**2) * across)
    return C.factor @ along, solve_triangular(C.factor, b, lower=True, trans=1)


C4, ALONG = dense(4, 100.0), np.array([1.0, -0.5, 2.0, 0.3])
S4 = C4.factor @ ALONG
USELESS = {
    "concave": pair_at(C4, ALONG, 1.0, cosine=-0.5),
    "no curvature": (S4, np.zeros(4)),
    "no way": (np.zeros(4), S4),
    "no pair": (np.zeros(4), np.zeros(4)),
    "at right angles": pair_at(C4, ALONG, 50.0, cosine=0.99 * SMALLEST_COSINE),
    "nan": (S4, np.array([np.nan, 1, 1, 1])),
    "infinite gradient": (S4, np.array([np.inf, 1, 1, 1])),
    "infinite position": (np.array([np.inf, 1, 1, 1]), S4),
    "overflow": (1e200 * S4, 1e200 * S4),
}


@pytest.mark.parametrize("name", USELESS)
def test_guard_skips(name):
    with np.errstate(all="ignore"):
        assert guarded(C4, *USELESS[name]) is None


@pytest.mark.parametrize(("y_over_s", "cosine"), [(0.21, 1.0), (1e4, 1.0), (30.0, 1.01 * 0.01)])
def test_guard_returns_a_good_pair_unchanged(y_over_s, cosine):
    s, y = pair_at(C4, ALONG, y_over_s, cosine)
    assert all(a is b for a, b in zip(guarded(C4, s, y), (s, y), strict=True))


@pytest.mark.parametrize(
    ("y_over_s", "cosine"), [(0.19, 1.0), (1e-9, 1.0), (0.1, 0.5), (1.0, 0.02)]
)
def test_guard_damps_to_equality_and_bounds_how_far_c_widens(y_over_s, cosine):
    s, y = pair_at(C4, ALONG, y_over_s, cosine)
    predicted = C4.inverse_product(s)
    kept, damped = guarded(C4, s, y)
    assert kept is s
    assert s @ damped == pytest.approx(DAMPING * s @ predicted, rel=1e-10)
    shares = np.linalg.lstsq(np.column_stack([y, predicted]), damped, rcond=1e-14)[0]
    assert_close(np.column_stack([y, predicted]) @ shares, damped)
    B = bfgs(C4.matrix, s, damped)
    assert s @ np.linalg.solve(B, s) == pytest.approx(DAMPING * s @ predicted, rel=1e-8)
    if cosine == 1:  # B is C but along s
        np.testing.assert_allclose(eigvalsh(B, C4.matrix), [1, 1, 1, 1 / DAMPING], rtol=1e-8)


def heavy_tailed(n, d):
    return rng.standard_t(3, (n, d)) + rng.exponential(size=(n, d)) ** 2


@pytest.mark.parametrize("d", [1, 5, 30])
def test_multisecant_is_exact_on_a_gaussian_but_for_the_prior(d):
    """The prior is of unit scale: beside draws that reach ten thousand times as far it is nothing."""
    scale = np.geomspace(10, 1e-3, d)
    H = spd(d) * np.outer(scale, scale)
    L = cholesky(H, lower=True)
    draws = solve_triangular(L, heavy_tailed(4 * d + 10, d).T, lower=True, trans=1).T

    def error(reach):
        B = multisecant(identity(d, dense=True), reach * draws, -reach * draws @ H).matrix
        return np.abs(L.T @ B @ L - np.eye(d)).max()

    assert error(1e4) < 1e-5
    assert error(1.0) > 1e-2


@pytest.mark.parametrize("n", [3, 40])
def test_multisecant_solves_its_equation_in_any_coordinates(n):
    d, prior = 8, quasi_newton.PRIOR_DRAWS
    C, positions = dense(d, 100.0), heavy_tailed(n, d)
    gradients = -np.tanh(positions) + 0.1 * heavy_tailed(n, d)
    B = multisecant(C, positions, gradients).matrix
    assert eigvalsh(B)[0] > 0
    S, Y = (draws - draws.mean(axis=0) for draws in (positions, gradients))
    left = B @ (Y.T @ Y + prior * np.linalg.inv(C.matrix)) @ B
    assert_close(left, S.T @ S + prior * C.matrix)
    A = rng.standard_normal((d, d)) * np.geomspace(1, 100, d)[:, None]
    moved = multisecant(
        Dense.of(A @ C.matrix @ A.T), positions @ A.T + 7, gradients @ np.linalg.inv(A) - 9
    )
    inverse = np.linalg.inv(A)
    assert_close(inverse @ moved.matrix @ inverse.T, B, 1e-6)


def test_multisecant_of_a_stuck_chain_is_what_it_was():
    C = dense(4)
    B = multisecant(C, np.ones((50, 4)), np.full((50, 4), 3.0))
    assert_close(B.matrix, C.matrix)


@pytest.mark.parametrize("memory", [1, 4, 10])
def test_of_largest_curvatures_takes_the_of_largest_curvatures_directions_out(memory):
    d = 60
    rest, stiff = np.geomspace(0.2, 3, d - memory), 100 * 3.0 ** np.arange(memory)
    Q, variances, mean = rotation(d), np.exp(rng.standard_normal(d)), rng.standard_normal(d)
    H = (Q * np.r_[rest, stiff]) @ Q.T / np.sqrt(np.outer(variances, variances))
    estimate = of_largest_curvatures(lambda x: -H @ (x - mean), mean + 0.3, variances, memory)
    L = columns(estimate.draw, d)
    expected = np.sort(np.r_[rest, np.ones(memory)])
    np.testing.assert_allclose(eigvalsh(L.T @ H @ L), expected, rtol=1e-3)


@pytest.mark.parametrize("kappa", [10, 1e4, 1e8])
@pytest.mark.parametrize("memory", [5, 20])
def test_of_largest_curvatures_takes_some_gradients_only(memory, kappa):
    # At most 2m + 1 vectors, or 20, at first, and m at each of three restarts, without a gap in H.
    H, calls = spd(300, kappa), []
    of_largest_curvatures(lambda x: calls.append(x) or -H @ x, np.zeros(300), np.ones(300), memory)
    assert len(calls) <= 5 * memory + 30


def test_of_largest_curvatures_leaves_out_negative_curvature():
    H = np.diag([100.0, -1.0, 50.0, -2.0, 0.0, 10.0, -3.0, -4.0])
    estimate = of_largest_curvatures(lambda x: -H @ x, np.ones(8), np.ones(8), 6)
    np.testing.assert_allclose(np.sort(estimate.values), [0.01, 0.02, 0.1], rtol=1e-6)
    assert eigvalsh(full(estimate))[0] > 0


def path_of(S, Y):
    """Positions and gradients of log p with those differences."""
    start = rng.standard_normal((2, len(S)))
    return [(start[0], start[1])] + [
        (start[0] + s, start[1] - y)
        for s, y in zip(np.cumsum(S, 1).T, np.cumsum(Y, 1).T, strict=True)
    ]


def mixed_pairs(d, m):
    """Some good, some concave, some to be damped."""
    S, Y = curvature_pairs(d, m)
    Y[:, 1::4] *= -1
    Y[:, 2::4] *= 1e-3
    return S, Y


@pytest.mark.parametrize("memory", [None, 3])
@pytest.mark.parametrize("n", [1, 4])
def test_rejected_trajectories_change_the_number_of_draws_only(memory, n):
    c = begin(5, memory, for_ever=False)
    np.testing.assert_array_equal(full(c.inverse_hessian), np.eye(5))
    c = follow(c, path_of(*mixed_pairs(5, 6)), accepted=True)
    after = follow(c, path_of(*curvature_pairs(5, n)), accepted=False)  # n = 1: cut by a divergence
    assert after.inverse_hessian is c.inverse_hessian
    assert after == c._replace(n_draws=2)


def with_pairs(B, C, S, Y):
    """Algorithm 2's line 22 by hand: B and the pairs that entered it."""
    used = []
    for s, y in zip(S.T, Y.T, strict=True):
        pair = guarded(C, s, y)
        if pair:
            B, used = eq_1(B, *pair), [*used, pair]
    return B, used


@pytest.mark.parametrize("for_ever", [False, True])
def test_pairs_enter_in_their_order(for_ever):
    d, C = 5, dense(5, 100.0)
    c, B, kept = begin(d, None, for_ever)._replace(inverse_hessian=C, kept=1), C.matrix, 1
    for trial in range(1, 4):
        S, Y = mixed_pairs(d, 8)
        B, used = with_pairs(B, c.inverse_hessian, S, Y)
        kept += len(used)
        c = follow(c, path_of(S, Y), accepted=True)
        assert_close(c.inverse_hessian.matrix, B, 1e-7)
        assert (c.kept, c.skipped) == (kept, 8 * trial + 1 - kept)
    assert 0 < c.skipped < c.kept


@pytest.mark.parametrize("for_ever", [False, True])
def test_limited_memory_keeps_the_last_pairs(for_ever, monkeypatch):
    d, m, c, used, diagonals = 7, 4, begin(7, 4, for_ever), [], []
    monkeypatch.setattr(curvature, "lbfgs", lambda b, *SY: diagonals.append(b) or lbfgs(b, *SY))
    for _ in range(3):
        S, Y = mixed_pairs(d, 7)
        used += with_pairs(np.eye(d), c.inverse_hessian, S, Y)[1]
        c = follow(c, path_of(S, Y), accepted=True)
    np.testing.assert_allclose(c.pairs, used[-m:], rtol=1e-8, atol=1e-10)
    B = np.diag(diagonals[-1])
    for s, y in used[-m:]:
        B = eq_1(B, s, y)
    # between the inverse curvatures along y and along s of the last pair
    assert (s @ y) / (y @ y) <= diagonals[-1].min() <= diagonals[-1].max() <= (s @ s) / (s @ y)
    assert_close(full(c.inverse_hessian), B, 1e-6)
    assert c.kept == len(used)


def test_a_matrix_that_round_off_makes_indefinite_is_not_taken(monkeypatch):
    def unguarded(C, s, y):
        return CurvaturePair(s, y) if s @ y > 0 else None

    monkeypatch.setattr(curvature, "guarded", unguarded)
    c = begin(2, None, for_ever=True)._replace(kept=3, skipped=1)
    s, y = np.array([1.0, 0.0]), np.array([2.0**-60, 1.0])  # B = ((2¹²⁰, −2⁶⁰), (−2⁶⁰, 1))
    good = follow(c, [(0 * s, 0 * y), (s, -s), (0 * s, -2 * s)], accepted=True)
    assert (good.kept, good.skipped) == (4, 2)
    after = follow(c, [(0 * s, 0 * y), (s, -y), (0 * s, -2 * y)], accepted=True)
    assert after.inverse_hessian is c.inverse_hessian
    assert after == c._replace(n_draws=1, skipped=1 + 2)


@pytest.mark.parametrize(
    ("d", "memory", "for_ever", "first"),
    [
        *((3, None, False, 100), (40, None, False, 120), (8, 4, False, 25), (60, 4, False, 25)),
        *((3, None, True, None), (3, 2, True, None)),
    ],
)
def test_windows_begin_after_enough_draws(d, memory, for_ever, first):
    c, windows = begin(d, memory, for_ever), []
    for _ in range(first or 150):
        c = follow(c, path_of(*curvature_pairs(d, 1)), accepted=True)
        windows.append(c.window)
    window = 100 if memory is None else 25
    assert windows == [0] * (len(windows) - 1) + [window if first else 0]


def in_window(d, memory, window):
    return begin(d, memory, for_ever=False)._replace(window=window, kept=9, turning_time=2.0)


def test_a_window_gives_the_estimate_of_its_draws_and_doubles():
    d, window, n = 4, 6, 0
    c = in_window(d, None, window)
    for _ in range(3):
        draws, C = rng.standard_normal((2, window, d)), c.inverse_hessian
        for i, (position, gradient) in enumerate(zip(*draws, strict=True)):
            assert c.inverse_hessian is C
            assert c.window == window
            assert len(c.draws) == i
            c = gather(c, position, gradient, None)
        assert_close(c.inverse_hessian.matrix, multisecant(C, *draws).matrix, 1e-12)
        n, window = n + window, 2 * window
        assert (c.n_draws, c.kept, c.window, c.draws) == (n, 9 + n, window, ())


def test_limited_memory_takes_the_moments_of_the_window(monkeypatch):
    d, window, seen = 4, 25, []
    positions = 1e6 + np.geomspace(1, 100, d) * heavy_tailed(2 * window, d)
    gradients = heavy_tailed(2 * window, d)
    monkeypatch.setattr(
        curvature, "of_largest_curvatures", lambda *args: seen.append(args) or low_rank(d, 2)
    )
    c = in_window(d, 3, window)._replace(window=2 * window)
    for position, gradient in zip(positions, gradients, strict=True):
        assert not seen
        c = gather(c, position, gradient, max)
    ((function, centre, variances, memory),) = seen
    assert function is max
    assert memory == 3
    np.testing.assert_allclose(centre, positions.mean(axis=0), rtol=1e-13)
    expected = np.sqrt(positions.var(axis=0) / gradients.var(axis=0))
    np.testing.assert_allclose(variances, expected, rtol=1e-8)
    assert (c.kept, c.window, c.draws) == (9 + 2, 4 * window, ())


@pytest.mark.parametrize("raised", [LinAlgError, FloatingPointError])
@pytest.mark.parametrize(("memory", "name"), [(None, "multisecant"), (3, "of_largest_curvatures")])
def test_a_window_without_an_estimate_leaves_c_as_it_was(memory, name, raised, monkeypatch):
    def fail(*_):
        raise raised

    monkeypatch.setattr(curvature, name, fail)
    c = in_window(4, memory, 1)
    after = gather(c, np.ones(4), np.ones(4), None)
    assert after.inverse_hessian is c.inverse_hessian
    assert after == c._replace(n_draws=1, window=2)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [((None, None, None), 2.0), ((0.1, None, 0.3), LEAST_TIME), ((4.0, 0.1, 2.5), 2.2)],
)
def test_turning_time_is_the_mean_of_a_windows_turns_and_never_below_the_least(turns, expected):
    c = in_window(2, None, 3)
    for turn in turns:
        assert c.turning_time == 2
        c = gather(c, rng.standard_normal(2), rng.standard_normal(2), None, turn)
    assert c.turning_time == pytest.approx(expected, rel=1e-13)
    assert c.turns == ()  # the next window's are of another C


def density(q):
    """log p = −x⁴/4 − x²y²/2 − y²/2 + xy/5, of another curvature at each point."""
    x, y = q
    logp = -(x**4) / 4 - x**2 * y**2 / 2 - y**2 / 2 + x * y / 5
    return logp, np.array([-(x**3) - x * y**2 + y / 5, -(x**2) * y - y + x / 5])


def run(x, step_size, C, M, n_steps):
    q, p = x[:2], x[2:]
    points = leapfrog(q, p, density(q)[1], density, step_size, C, M)
    path = list(itertools.islice(points, n_steps))
    assert all(logp == density(q)[0] for q, _, logp, _ in path)
    np.testing.assert_array_equal(path[-1][3], density(path[-1][0])[1])
    return np.array([np.concatenate(point[:2]) for point in path])


CM = {
    "M = C": (C2 := Dense.of(np.array([[0.8, 0.3], [0.3, 0.5]])), C2),
    "M = 1": (C2, identity(2, dense=False)),
    "any M": (C2, Dense.of(np.array([[0.6, -0.2], [-0.2, 1.1]]))),
}
START = np.array([0.7, -0.4, 0.5, 0.9])


@pytest.mark.parametrize("name", CM)
def test_leapfrog_preserves_volume_and_is_reversible(name):
    C, M = CM[name]
    h, L = 1e-5, 10
    jacobian = np.column_stack(
        [(run(START + h * e, 0.3, C, M, L) - run(START - h * e, 0.3, C, M, L))[-1] / (2 * h)
         for e in np.eye(4)]
    )  # fmt: skip
    assert np.linalg.det(jacobian) == pytest.approx(1, abs=1e-8)
    there = run(START, 0.3, C, M, L)[-1]
    back = run(there * [1, 1, -1, -1], 0.3, C, M, L)[-1]
    np.testing.assert_allclose(back * [1, 1, -1, -1], START, atol=1e-12)
    assert np.abs(there - START).max() > 0.1


@pytest.mark.parametrize("name", CM)
def test_leapfrogs_energy_error_is_of_second_order(name):
    C, M = CM[name]

    def energy(x):
        return -density(x[:2])[0] + x[2:] @ M.inverse_product(x[2:]) / 2

    step_sizes = 0.1 / 2 ** np.arange(5)
    errors = [
        max(abs(energy(x) - energy(START)) for x in run(START, step, C, M, round(4 / step)))
        for step in step_sizes
    ]
    slope = np.polyfit(np.log(step_sizes), np.log(errors), 1)[0]
    assert 1.9 < slope < 2.1


def test_leapfrog_with_mass_c_is_that_of_another_object_equal_to_c():
    copy = Dense.of(C2.matrix.copy())
    assert copy is not C2
    np.testing.assert_allclose(run(START, 0.3, C2, copy, 20), run(START, 0.3, C2, C2, 20))


@pytest.mark.parametrize("name", CM)
def test_leapfrog_is_that_of_hmc_with_inverse_mass_c_m_c(name):
    # p = C p̃: q' = CM⁻¹C p̃, p̃' = ∇log p
    C, M = CM[name]
    inverse_mass = C.matrix @ np.linalg.solve(full(M), C.matrix)
    q, momentum = START[:2], np.linalg.solve(C.matrix, START[2:])
    for _ in range(10):
        momentum = momentum + 0.15 * density(q)[1]
        q = q + 0.3 * inverse_mass @ momentum
        momentum = momentum + 0.15 * density(q)[1]
    expected = np.r_[q, C.matrix @ momentum]
    np.testing.assert_allclose(run(START, 0.3, C, M, 10)[-1], expected, rtol=1e-11)


def test_of_largest_curvatures_of_one_unknown_is_its_variance():
    one = of_largest_curvatures(lambda x: -4 * x, np.zeros(1), np.full(1, 0.25), 5)
    assert one.product(np.ones(1)) == 0.25
    assert one.values.size == 0


@pytest.mark.parametrize("slope", [0.0, np.nan])
def test_window_without_curvature_leaves_c_as_it_was(slope):
    c = curvature.begin(20, 5, for_ever=False)._replace(window=3)
    for x in np.random.default_rng(0).standard_normal((3, 20)):
        new = curvature.gather(c, x, x * slope, lambda x: x * slope)
        assert new.inverse_hessian is c.inverse_hessian
        c = new
    assert c.window == 6
    assert c.kept == 0
