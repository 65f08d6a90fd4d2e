"""Orders of rows are functions of a chain's place; minibatches say which arrays they are rows of."""

from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytest

from targets import gradient_of, on_rows

from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.metric import Diagonal
from pymc_sghmc.loaders import ArrayLoader
from pymc_sghmc.rows.orders import type_of_row_numbers
from pymc_sghmc.rows.sources import PILOT_ROWS

D, BATCH = 2, 6000
WINDOW = 10 * BATCH  # rows: more than the pilot has, and a pass has three windows
N = 3 * WINDOW
THETA = np.array([0.3, -0.2])
rng = np.random.default_rng(0)
X = rng.standard_normal((N, D))
ROWS = {"X": X, "y": X @ [1.0, -1.0] + rng.standard_normal(N)}
SORTED = np.argsort(ROWS["y"])
BLOCK = 2 * BATCH


@dataclass
class InOrder:
    """A loader whose passes are the rows as they stand."""

    total_size: int = N
    buffer_rows: int = WINDOW

    def __iter__(self):
        return ({k: v[i : i + BLOCK] for k, v in ROWS.items()} for i in range(0, N, BLOCK))


DATA = {
    "with replacement": {"data": ROWS},
    "by leverage": {"data": ROWS},
    "epochs": {"data": ROWS, "replace": False},
    "stream": {"data": InOrder()},
    "shuffled stream": {"data": ArrayLoader(ROWS, block_rows=BLOCK, buffer_rows=WINDOW)},
}


def gradient_from(kind):
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=D)
        x, y = pm.Data("X", X[:4]), pm.Data("y", ROWS["y"][:4])
        pm.Normal("likelihood", x @ beta, 1, observed=y)
    gradient = gradient_of(model, BATCH, **DATA[kind])
    if kind == "by leverage":
        gradient = ControlVariates(gradient)
        gradient.set_centre(np.array([0.9, -1.0]), Diagonal(0.05 * np.ones(D)))
    return gradient


def by_hand(numbers):
    """Gradient at `THETA` from rows of these numbers."""
    x, y = X[numbers], ROWS["y"][numbers]
    return N / len(numbers) * x.T @ (y - x @ THETA) - THETA


def numbers_of(minibatch):
    """Numbers of its rows in all of the data, found by their values."""
    [y] = [array for array in minibatch.arrays if array.ndim == 1]
    return SORTED[np.searchsorted(ROWS["y"], y[minibatch.rows[0]], sorter=SORTED)]


# --- A minibatch and its arrays


def test_a_streams_minibatch_keeps_its_rows_after_a_probe_and_in_later_windows():
    gradient = gradient_from("stream")
    order, generator = gradient.order, np.random.default_rng(1)
    drawn, place = order.draw(generator, None, WINDOW // BATCH)
    minibatches = [drawn.one(i) for i in range(len(drawn.drawn[0]))]
    numbers = np.concatenate([numbers_of(minibatch) for minibatch in minibatches])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(WINDOW))  # the first window
    minibatch = next(m for m in minibatches if m.rows[0].max() >= PILOT_ROWS)
    expected = by_hand(numbers_of(minibatch))

    probe = order.probe(generator)
    assert probe.rows[0].max() < PILOT_ROWS
    assert probe.arrays is not minibatch.arrays
    np.testing.assert_allclose(gradient(THETA, probe)[1], by_hand(numbers_of(probe)), rtol=1e-10)
    np.testing.assert_allclose(gradient(THETA, minibatch)[1], expected, rtol=1e-10)

    later, _ = order.draw(generator, place, 1)
    assert (numbers_of(later.one(0)) >= WINDOW).all()
    np.testing.assert_allclose(gradient(THETA, minibatch)[1], expected, rtol=1e-10)
    # Negative control: rows of the same numbers of the pilot's arrays are others, or none.
    with pytest.raises(IndexError):
        on_rows(gradient, THETA, *minibatch.rows)


def test_a_probe_moves_no_chain_on():
    for kind in DATA:
        order = gradient_from(kind).order
        first, place = order.draw(np.random.default_rng(1), None, 1)
        second, _ = order.draw(np.random.default_rng(2), place, 1)
        order.probe(np.random.default_rng(3))
        again, _ = order.draw(np.random.default_rng(2), place, 1)
        np.testing.assert_array_equal(numbers_of(second.one(0)), numbers_of(again.one(0)))
        assert (numbers_of(first.one(0)) != numbers_of(second.one(0))).any()


# --- The place of a chain


class Walk:
    """A chain's way through an order."""

    def __init__(self, seed):
        self.rng, self.place, self.seen = np.random.default_rng(seed), None, []

    def on(self, order, k):
        """Draw ``k`` minibatches, in as many calls as the order needs."""
        while k > 0:
            block, self.place = order.draw(self.rng, self.place, k)
            drawn = len(block.drawn[0])
            self.seen += [numbers_of(block.one(i)) for i in range(drawn)]
            k -= drawn


SIZES = [1, 3, 7, 2, 12, 1, 9]  # of blocks: more than a pass in all


@pytest.mark.parametrize("kind", DATA)
def test_two_chains_on_one_order_get_what_each_would_get_alone(kind):
    alone = []
    for seed in (1, 2):
        order, chain = gradient_from(kind).order, Walk(seed)
        for k in SIZES:
            chain.on(order, k)
        alone.append(chain.seen)
    assert any((a != b).any() for a, b in zip(*alone, strict=True))
    order, chains = gradient_from(kind).order, [Walk(seed) for seed in (1, 2)]
    for k in SIZES:
        for chain in chains:
            chain.on(order, k)
    for chain, seen in zip(chains, alone, strict=True):
        np.testing.assert_array_equal(chain.seen, seen)


@pytest.mark.parametrize("kind", ["epochs", "stream", "shuffled stream"])
def test_the_same_place_gives_the_same_rows_whatever_came_between(kind):
    order, chain = gradient_from(kind).order, Walk(1)
    places, firsts = [], []
    for k in SIZES:
        places.append(chain.place)
        chain.on(order, k)
    assert places[0] is None
    for place in (*places[1:], *places[:0:-1]):  # on and back again
        block, new = order.draw(None, place, 2)  # no generator: the seed is in the place
        assert new[0] == place[0]
        assert new[1] == place[1] + len(block.drawn[0])
        firsts.append(numbers_of(block.one(0)))
    starts = np.cumsum(SIZES)[:-1]
    for i, found in zip((*starts, *starts[::-1]), firsts, strict=True):
        np.testing.assert_array_equal(found, chain.seen[i])


@pytest.mark.parametrize("kind", ["with replacement", "by leverage"])
def test_independent_orders_have_no_place(kind):
    order, chain = gradient_from(kind).order, Walk(1)
    assert order.independent
    chain.on(order, 5)
    assert chain.place is None
    block, place = order.draw(np.random.default_rng(1), "anything", 5)
    assert place == "anything"
    np.testing.assert_array_equal([numbers_of(block.one(i)) for i in range(5)], chain.seen)


# --- Unknowns of other steps


def test_values_of_other_unknowns_come_back_when_the_body_raises():
    with pm.Model() as model:
        mu, shift = pm.Normal("mu"), pm.Normal("shift")
        pm.Normal("y", mu + shift, 1, observed=ROWS["y"])
    gradient = gradient_of(model, BATCH, [model.rvs_to_values[mu]])
    density, position, numbers = gradient.density, np.array([0.3]), np.arange(BATCH)

    def expected(shift):
        return N / BATCH * (ROWS["y"][numbers] - position - shift).sum() - position

    density.condition_on({"mu": 0.0, "shift": 0.5})
    before = density.given

    def fails_elsewhere():
        with density.at((np.array(-2.0),)):
            np.testing.assert_allclose(on_rows(gradient, position, numbers)[1], expected(-2.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_elsewhere()
    assert [np.asarray(value) for value in density.given] == list(before)
    np.testing.assert_allclose(on_rows(gradient, position, numbers)[1], expected(0.5))


# --- More rows than 32 bits count


def test_row_numbers_beyond_32_bits_have_64():
    for n_rows in (10, 2**31, 2**31 + 1, 2**40):
        assert np.iinfo(type_of_row_numbers(n_rows)).max >= n_rows - 1
    assert type_of_row_numbers(2**31) is np.int32


def test_rows_beyond_32_bits_are_drawn_and_read(tmp_path):
    n_rows = 2**32  # half of them; the file has holes and takes no room
    with open(tmp_path / "y", "wb") as file:
        file.truncate(n_rows)
    y = np.memmap(tmp_path / "y", "u1", "r+", shape=n_rows)
    y[-1] = 7
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("likelihood", mu, 1, observed=pm.Data("y", y[:4]))
    for replace in (True, False):
        gradient = gradient_of(model, BATCH, data={"y": y}, replace=replace)
        drawn, _ = gradient.order.draw(np.random.default_rng(0), None, 10)
        above = (drawn.drawn[0] >= 2**31).mean()  # of 200 rows: a standard error of 0.035
        assert abs(above - 0.5) < 0.15
        assert drawn.drawn[0].min() >= 0
    _, slope = on_rows(gradient, np.array([0.5]), np.array([n_rows - 1]))
    np.testing.assert_allclose(slope, [n_rows * (7 - 0.5) - 0.5])
