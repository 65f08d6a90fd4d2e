"""Effects of groups within groups against dense linear algebra."""

import numpy as np
import pytest

from scipy.sparse import csr_array

from pymc_sghmc.hierarchy.nested_effects import conditional_laws

N_SITES, N_REGIONS, N_COUNTRIES = 40, 8, 3
PLACES = [slice(0, 40), slice(40, 48), slice(48, 51)]
PAIRS = [(0, 1), (0, 2), (1, 2)]


def rows(crossed=False):
    """A of Gaussian rows that see a site, its region and its country, the gradient and a point."""
    rng = np.random.default_rng(1)
    site = np.concatenate([np.arange(N_SITES), rng.integers(N_SITES, size=300)])
    region = rng.integers(N_REGIONS, size=site.size) if crossed else site % N_REGIONS
    country = region % N_COUNTRIES
    X = np.zeros((site.size, 51))
    for place, index in zip(PLACES, (site, region, country), strict=True):
        X[np.arange(site.size), place.start + index] = rng.uniform(0.5, 2)
    A = X.T @ (rng.uniform(0.1, 1, site.size)[:, None] * X)
    z = rng.standard_normal(51)
    return A, rng.standard_normal(51), z


def test_levels_are_those_of_gaussian_elimination():
    A, slope, z = rows()
    found = conditional_laws(
        csr_array(A), slope, z, PLACES, PAIRS, np.zeros((z.size, 0)), A.diagonal()
    )
    linear = slope + A @ z
    for level, place in enumerate(PLACES):
        below = slice(0, place.start)
        posterior = A[below, below] + np.eye(place.start)  # beside the prior N(0, 1)
        through = np.linalg.solve(posterior, A[below, :])
        left = A - A[:, below] @ through
        of_level = linear - A[:, below] @ np.linalg.solve(posterior, linear[below])
        np.testing.assert_allclose(found.precision[place], np.diag(left)[place], rtol=1e-9)
        np.testing.assert_allclose(found.linear[place], of_level[place], rtol=1e-9)
        for i, j in PAIRS:
            if i == level:
                known = found.blocks[i, j]
                block = np.zeros((place.stop - place.start, 51))
                block[np.arange(len(block)), PLACES[j].start + known.above] = known.size
                np.testing.assert_allclose(block[:, PLACES[j]], left[place, PLACES[j]], atol=1e-9)


def test_coefficients_of_one_group_are_taken_out_together():
    """An intercept and a slope that the same few rows see both say the same of a region.

    Each by itself said so again, until nothing was left that the rows said of regions.
    """
    rng = np.random.default_rng(2)
    site = np.repeat(np.arange(N_SITES), 4)
    x = rng.normal(1.0, 0.3, site.size)  # far from zero: intercept and slope are hardly told apart
    X = np.zeros((site.size, 2 * N_SITES + N_REGIONS))
    rows = np.arange(site.size)
    X[rows, 2 * site] = 1
    X[rows, 2 * site + 1] = x
    X[rows, 2 * N_SITES + site % N_REGIONS] = 1
    A = 3.0 * X.T @ X
    slope = rng.standard_normal(len(A))
    z = rng.standard_normal(len(A))
    sites = slice(0, 2 * N_SITES)
    regions = slice(2 * N_SITES, len(A))
    shared = rng.standard_normal((len(A), 1))

    found = conditional_laws(
        csr_array(A), slope, z, [sites, regions], [(0, 1)], shared, A.diagonal()
    )

    linear = slope + A @ z
    posterior = A[sites, sites] + np.eye(2 * N_SITES)
    below = np.linalg.solve(posterior, np.c_[A[sites, regions], linear[sites], shared[sites]])
    through = A[regions, sites] @ below
    left = A[regions, regions] - through[:, :N_REGIONS]
    np.testing.assert_allclose(found.precision[regions], np.diag(left), rtol=1e-9)
    assert found.precision[regions].min() > 1  # each by itself left none, and less
    np.testing.assert_allclose(found.linear[regions], linear[regions] - through[:, -2], rtol=1e-9)
    np.testing.assert_allclose(found.shared[regions], shared[regions] - through[:, -1:], rtol=1e-9)
    # of a site what is returned is of each coefficient alone, with the mean of both together
    precision = found.precision[sites] + 1
    np.testing.assert_allclose(found.precision[sites], np.diag(A)[sites], rtol=1e-9)
    np.testing.assert_allclose(found.linear[sites] / precision, below[:, -2], rtol=1e-9)
    np.testing.assert_allclose(found.shared[sites, 0] / precision, below[:, -1], rtol=1e-9)
    block = found.blocks[0, 1]
    by_region = np.zeros((2 * N_SITES, N_REGIONS))
    by_region[np.arange(2 * N_SITES), block.above] = block.size / precision
    np.testing.assert_allclose(by_region, below[:, :N_REGIONS], atol=1e-9)


def test_rows_that_see_a_sum_tell_nothing_else_where_curvatures_are_typical_ones():
    """Typical curvatures of groups and of the larger ones they are in aren't of the same rows.

    What is left of a region's, beside that of its sites, was a difference of large numbers.
    """
    rng = np.random.default_rng(3)
    site = np.repeat(np.arange(N_SITES), 30)
    region = site % N_REGIONS
    country = region % N_COUNTRIES
    X = np.zeros((site.size, 52))  # the last one is an intercept
    for place, index in zip(PLACES, (site, region, country), strict=True):
        X[np.arange(site.size), place.start + index] = 1
    X[:, 51] = 1
    A = X.T @ (rng.uniform(10, 100, site.size)[:, None] * X)
    typical = A.diagonal()[:51] * rng.uniform(0.7, 1.4, 51)

    found = conditional_laws(
        csr_array(A[:51, :51]), np.zeros(51), np.zeros(51), PLACES, PAIRS, A[:51, 51:], typical
    )

    sites, regions, countries = (found.precision[place] for place in PLACES)
    np.testing.assert_allclose(sites, typical[:N_SITES])
    of_sites = np.bincount(np.arange(N_SITES) % N_REGIONS, 1 / (1 + 1 / sites))
    np.testing.assert_allclose(regions, of_sites)
    of_regions = np.bincount(np.arange(N_REGIONS) % N_COUNTRIES, 1 / (1 + 1 / regions))
    np.testing.assert_allclose(countries, of_regions)
    # an intercept that moves one way and effects the other
    np.testing.assert_allclose(found.shared[:, 0], found.precision)
    for (i, _), block in found.blocks.items():
        np.testing.assert_allclose(block.size, found.precision[PLACES[i]])


def test_a_huge_group_leaves_small_ones_what_their_rows_say():
    A, slope, z = rows()
    A = A[:40, :40]
    expected = np.diag(A).copy()
    expected[0] = A[0, 0] = 1e10 * A[1, 1]
    found = conditional_laws(
        csr_array(A), slope[:40], z[:40], PLACES[:1], [], np.zeros((40, 0)), A.diagonal()
    )
    np.testing.assert_allclose(found.precision, expected)


def test_what_is_no_number_says_nothing():
    """As where a density isn't finite at the mean of a first fit."""
    A, slope, z = rows()
    A[3] = A[:, 3] = np.nan
    found = conditional_laws(
        csr_array(A), slope, z, PLACES, PAIRS, np.zeros((z.size, 0)), A.diagonal()
    )
    assert found.precision[3] == 0
    assert np.isfinite(found.precision).all()
    assert np.isfinite(found.linear).all()


@pytest.mark.parametrize("crossed", [True, False])
def test_crossed_effects_count_as_unrelated(crossed):
    A, slope, z = rows(crossed)
    found = conditional_laws(
        csr_array(A[:48, :48]),
        slope[:48],
        z[:48],
        PLACES[:2],
        PAIRS[:1],
        np.zeros((48, 0)),
        A.diagonal()[:48],
    )
    assert any(block.size.any() for block in found.blocks.values()) != crossed
    if crossed:
        np.testing.assert_allclose(found.precision, np.diag(A)[:48])
        np.testing.assert_allclose(found.linear, (slope + np.diag(A) * z)[:48])
