"""Remembered terms of rows against two evaluations of the minibatch, for all kinds of models."""

import modes
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc.pytensorf import compile
from pytensor import config, scan
from pytensor.compile.mode import Mode

from pymc_sghmc.models.contract import minibatch_log_density
from pymc_sghmc.models.graphs import array_of
from pymc_sghmc.models.row_axes import MIXED, row_axes
from pymc_sghmc.models.row_terms import difference, row_terms

FAST = {**modes.FAST, "on_unused_input": "ignore"}
N, D = 30, 3
rng = np.random.default_rng(11)
X = rng.normal(size=(N, D))
Y = rng.normal(size=N)
YES = (Y > 0).astype(int)
COUNTS = rng.poisson(2.0, size=N)
CLASSES = rng.integers(0, 3, size=N)
GROUP, ITEM = rng.integers(0, 4, size=N), rng.integers(0, 5, size=N)
CORRELATED = np.array([[1.0, 0.3, 0.1], [0.3, 0.5, 0.2], [0.1, 0.2, 2.0]])
ADJACENT = np.ones((4, 4)) - np.eye(4)


def b(name="b", shape=D):
    return pm.Normal(name, 0, 2, shape=shape)


def scale(name="sigma", **kwargs):
    return pm.HalfNormal(name, 1.5, **kwargs)


def normal(mu, sigma=1.0):
    pm.Normal("y", mu, sigma, observed=Y)


def linear():
    normal(X @ b(), scale())


def logistic():
    pm.Bernoulli("y", logit_p=X @ b() + b("intercept", ()) + b("a", 4)[GROUP], observed=YES)


def probit():
    pm.Bernoulli("y", p=pm.math.invprobit(X @ b()), observed=YES)


def poisson():
    pm.Poisson("y", pt.exp(X @ b() + pm.Data("offset", Y)), observed=COUNTS)


def negative_binomial():
    alpha = pm.Exponential("alpha", 1)
    pm.NegativeBinomial("y", mu=pt.exp(X @ b()), alpha=alpha, observed=COUNTS)


def zero_inflated():
    psi, alpha = pm.Beta("psi", 2, 2), pm.Exponential("alpha", 1)
    mu = pt.exp(X @ b())
    pm.ZeroInflatedNegativeBinomial("y", psi=psi, mu=mu, alpha=alpha, observed=COUNTS)


def student():
    pm.StudentT("y", nu=pm.Gamma("nu", 2, 0.1), mu=X @ b(), sigma=scale(), observed=Y)


def gamma():
    pm.Gamma("y", mu=pt.exp(X @ b()), sigma=scale(), observed=np.exp(Y))


def beta():
    mu = pm.math.sigmoid(X @ b())
    pm.Beta("y", mu=mu, nu=pm.Gamma("nu", 5, 0.5), observed=pm.math.sigmoid(Y).eval())


def binomial():
    pm.Binomial("y", n=COUNTS + 1, logit_p=X @ b(), observed=YES)


def censored():
    pm.Censored(
        "y", pm.Normal.dist(X @ b(), scale()), lower=-1.0, upper=1.0, observed=Y.clip(-1, 1)
    )


def softmax():
    pm.Categorical("y", p=pm.math.softmax(X @ b(shape=(D, 3)), axis=-1), observed=CLASSES)


def classes_with_reference():
    eta = X @ b(shape=(D, 2))
    logits = pt.concatenate([pt.zeros((N, 1)), eta], axis=1)
    pm.Categorical("y", logit_p=logits, observed=CLASSES)


def ordered():
    cut = b("cut", 1)
    cutpoints = pt.concatenate([cut, cut + scale("gap", shape=1)])
    pm.OrderedLogistic("y", eta=X @ b(), cutpoints=cutpoints, observed=CLASSES)


def mixture():
    w = pm.Dirichlet("w", np.ones(2))
    pm.NormalMixture("y", w, b("mu", 2), scale(shape=2), observed=Y)


def robust():
    """A mixture written out: each row is an outlier or isn't."""
    mu, p = X @ b(), pm.Beta("p", 1, 5)

    def logp(value, mu, p):
        inlier = pt.log1p(-p) + pm.logp(pm.Normal.dist(mu, 1), value)
        return pm.math.logaddexp(inlier, pt.log(p) + pm.logp(pm.Normal.dist(0, 5), value))

    pm.CustomDist("y", mu, p, logp=logp, observed=Y)


def hierarchical():
    mu, tau = b("mu", ()), scale("tau")
    normal(X @ b() + pm.Normal("a", mu, tau, shape=4)[GROUP], scale())


def non_centred():
    """The derivative of μ + τz with respect to z changes with τ."""
    a = b("mu", ()) + scale("tau") * b("z", 4)
    normal(X @ b() + a[GROUP], scale())


def non_centred_by_row():
    normal(X @ b() + scale("tau") * b("z", 4)[GROUP], scale())


def shrunk():
    normal(X @ (b() * scale("local", shape=D) * scale("tau")))


def heteroscedastic():
    eta = X @ b()
    normal(eta + b("intercept", ()), pt.exp(0.3 * eta + X @ b("c")))


def factors():
    normal((b("U", (4, 2))[GROUP] * b("V", (5, 2))[ITEM]).sum(axis=1))


def intercepts_and_slopes():
    u = b("u", (4, 1 + D))
    normal(u[GROUP, 0] + (X * u[GROUP, 1:]).sum(axis=1), scale())


def cells():
    normal(b("table", (4, 5))[GROUP, ITEM], scale(shape=4)[GROUP])


def icar():
    phi = pm.ICAR("phi", W=ADJACENT, sigma=1.0)
    pm.Poisson("y", pt.exp(phi[GROUP] + b("intercept", ())), observed=COUNTS)


def two_columns():
    observed = np.stack([Y, Y**2], axis=1)
    pm.Normal("y", X @ b(shape=(D, 2)), scale(shape=2), observed=observed)


def two_observed():
    eta = X @ b()
    normal(eta, scale())
    pm.Poisson("counts", pt.exp(eta), observed=COUNTS)


def two_groups():
    beta = b()
    normal(X @ beta, scale())
    pm.Poisson("counts", pt.exp(X[:11] @ beta), observed=COUNTS[:11])


def intercept():
    normal(b("mu", ()), scale())


def bounded():
    sigma = pm.TruncatedNormal("sigma", 1, lower=0.1)
    normal(X @ b() + pm.Uniform("intercept", -2, 3), sigma)


def bounded_coefficients():
    normal(X @ pm.Uniform("b", -2, 3, shape=D), scale())


def potential():
    beta = b()
    normal(X @ beta)
    pm.Potential("sum", -pt.square(beta.sum()))


def integers():
    normal(pm.Data("x", np.round(3 * X).astype("int64")) @ b(), scale())


def named_dims():
    pm.modelcontext(None).add_coords({"column": range(D), "class": range(3)})
    beta = pm.Normal("b", dims=("column", "class"))
    pm.Categorical("y", logit_p=X @ beta, observed=CLASSES)


def multivariate():
    pm.MvNormal("y", b("mu"), CORRELATED, observed=X)


def quadratic():
    x = X[:, 0]
    normal(b("a", ()) * pt.exp(-x * scale("rate")) + b("c", ()), scale())


def constant_sums():
    normal(pt.stack([X[:, 0] * b("a", ()), X[:, 1] * b("c", ())], axis=1).sum(axis=1))


def network():
    normal(pt.tanh(X @ b("W", (D, 4))) @ b("v", 4))


def wide():
    pm.Categorical("y", logit_p=X @ b(shape=(D, 20)), observed=CLASSES)


def correlated():
    chol, _, _ = pm.LKJCholeskyCov("c", 2, D, sd_dist=pm.HalfNormal.dist(1), compute_corr=True)
    pm.MvNormal("y", b("mu"), chol=chol, observed=X)


def wide_factors():
    normal((b("U", (4, 9))[GROUP] * b("V", (5, 9))[ITEM]).sum(axis=1))


# How many numbers of each row are remembered, for each group of rows
def quantile():
    """A condition depends on the unknowns, and with it the derivative."""
    mu = X @ b()
    pm.CustomDist(
        "y",
        mu,
        logp=lambda value, mu: -pt.switch(value > mu, 0.7 * (value - mu), -0.3 * (value - mu)),
        observed=Y,
    )


def leaky():
    z = X @ b()
    normal(pt.switch(z > 0, z, 0.1 * z), scale())


def larger_of_two():
    z, w = X @ b(), X @ b("w")
    normal(pt.switch(z > w, z, w))


def unknown_knot():
    knot = b("knot", ())
    normal(b("slope", ()) + 0.8 * (X[:, 0] > knot) * (X[:, 0] - knot))


CASES = {
    linear: [2],
    logistic: [1],
    probit: [1],
    poisson: [1],
    negative_binomial: [2],
    zero_inflated: [4],
    student: [3],
    gamma: [2],
    beta: [2],
    binomial: [1],
    censored: [2],
    softmax: [3],
    classes_with_reference: [2],
    ordered: [3],
    mixture: [6],
    robust: [2],
    hierarchical: [2],
    non_centred: [3],
    non_centred_by_row: [4],
    heteroscedastic: [2],
    factors: [4],
    intercepts_and_slopes: [2],
    cells: [2],
    icar: [1],
    two_columns: [4],
    two_observed: [2],
    two_groups: [2, 1],
    intercept: [2],
    bounded: [3],
    potential: [1],
    integers: [2],
    named_dims: [3],
    multivariate: [3],
    quadratic: [4],
    constant_sums: [1],
}
REFUSED = [shrunk, bounded_coefficients, network, wide, correlated, wide_factors]


class Setup:
    """A model's terms of rows, and both ways to the difference, compiled."""

    def __init__(self, build, variables=None):
        with pm.Model() as model:
            build()
        self.point = point = model.initial_point()
        sizes = {rv.name: 5 for rv in model.observed_RVs}
        _, groups = minibatch_log_density(model, sizes, point)
        self.values = model.value_vars
        self.variables = [v for v in self.values if variables is None or v.name in variables]
        self.likelihoods = [group.log_likelihood for group in groups]
        self.batches = [group.batches for group in groups]
        self.arrays = [[array_of(source) for source in group.full_data] for group in groups]
        self.n_rows = [group.n_rows for group in groups]
        self.rows = row_terms(self.likelihoods, self.variables, self.batches, point)

    def compile(self, **kwargs):
        kwargs = {**FAST, **kwargs}
        batches = [batch for group in self.batches for batch in group]
        weights = [pt.vector(dtype=terms.dtype) for terms in self.likelihoods]
        cached = [pt.matrix(dtype=terms.dtype) for terms in self.rows.terms]
        centre = [v.type() for v in self.variables]
        gradient = difference(self.rows, weights, cached, centre)
        self.terms = compile([*self.values, *batches], self.rows.terms, **kwargs)
        inputs = [*self.values, *centre, *weights, *cached, *batches]
        self.remembered = compile(inputs, gradient, **kwargs)
        logp = sum((w * ll).sum() for w, ll in zip(weights, self.likelihoods, strict=True))
        gradient = pt.grad(logp, self.variables, disconnected_inputs="ignore")
        inputs = [*self.values, *weights, *batches]
        self.evaluated = compile(inputs, gradient, **kwargs)
        return self

    def positions(self, rng):
        """Random θ and θ̂, the same in what isn't among the variables."""
        near = {v.name: self._near(v, rng) for v in self.values}
        theta = {v.name: self._near(v, rng) for v in self.variables}
        return {**near, **theta}, near

    def _near(self, v, rng):
        start = self.point[v.name]
        return np.asarray(start + 0.4 * rng.standard_normal(start.shape), dtype=v.dtype)

    def minibatch(self, rng):
        """Random rows, not all different, and their weights."""
        rows = [rng.integers(n, size=n // 2) for n in self.n_rows]
        weights = [rng.exponential(size=idx.size) for idx in rows]
        types = [ll.dtype for ll in self.likelihoods]
        return rows, [w.astype(dtype) for w, dtype in zip(weights, types, strict=True)]

    def data(self, rows):
        pairs = zip(self.arrays, rows, strict=True)
        return [array[idx] for arrays, idx in pairs for array in arrays]

    def check(self, rng, tolerance):
        theta, centre = self.positions(rng)
        rows, weights = self.minibatch(rng)
        remember = self.terms(*centre.values(), *self.data([np.arange(n) for n in self.n_rows]))
        cached = [terms[idx, 1:] for terms, idx in zip(remember, rows, strict=True)]
        at_centre = [centre[v.name] for v in self.variables]
        data = self.data(rows)
        got = self.remembered(*theta.values(), *at_centre, *weights, *cached, *data)
        here = self.evaluated(*theta.values(), *weights, *data)
        there = self.evaluated(*centre.values(), *weights, *data)
        assert len(got) == len(self.variables)
        for mine, a, b in zip(got, here, there, strict=True):
            size = max(np.abs(a).max(), np.abs(b).max(), 1e-3)
            assert np.isfinite(size)
            assert np.shape(mine) == np.shape(a)
            np.testing.assert_allclose(mine, a - b, rtol=0, atol=tolerance * size)


# --- The difference


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_difference_equals_two_evaluations(build):
    setup = Setup(build)
    assert [terms.type.shape[1] for terms in setup.rows.terms] == [1 + n for n in CASES[build]]
    setup.compile()
    rng = np.random.default_rng(5)
    for _ in range(3):
        setup.check(rng, 1e-10)


@pytest.mark.parametrize("build", [quantile, leaky, larger_of_two, unknown_knot])
def test_conditions_that_depend_on_unknowns_move_the_derivative(build):
    setup = Setup(build).compile()
    rng = np.random.default_rng(5)
    for _ in range(5):
        setup.check(rng, 1e-10)


@pytest.mark.parametrize(
    "build",
    [linear, non_centred, *(pytest.param(b, marks=pytest.mark.slow) for b in (mixture, softmax))],
)
def test_difference_in_single_precision(build):
    with config.change_flags(floatX="float32"):
        setup = Setup(build).compile()
        setup.check(np.random.default_rng(5), 1e-4)


@pytest.mark.parametrize(
    "variables", [["b"], ["b", "sigma_log__"], ["tau_log__"], ["z", "mu"]], ids=" ".join
)
def test_difference_with_other_unknowns_held(variables):
    setup = Setup(non_centred, variables).compile()
    setup.check(np.random.default_rng(5), 1e-10)


def test_group_without_these_unknowns_adds_nothing_to_the_gradient():
    setup = Setup(lambda: (linear(), pm.Poisson("k", b("m", ()) ** 2, observed=COUNTS[:9])), ["b"])
    assert setup.rows.cuts[1] == []
    setup.compile().check(np.random.default_rng(5), 1e-10)


def test_terms_of_a_row_are_the_same_in_any_company():
    setup = Setup(mixture).compile()
    theta, _ = setup.positions(np.random.default_rng(5))
    [everything] = setup.terms(*theta.values(), *setup.data([np.arange(N)]))
    for idx in ([3], [7, 7, 1], [29, 0]):
        [part] = setup.terms(*theta.values(), *setup.data([np.array(idx)]))
        np.testing.assert_allclose(part, everything[idx], rtol=1e-12)


# --- Its price


def products_with_data(function):
    """How many matrix products a compiled function takes."""
    names = [type(node.op).__name__ for node in function.maker.fgraph.toposort()]
    return sum("Dot" in name or "Gem" in name for name in names)


@pytest.mark.parametrize(
    "build", [logistic, linear, poisson, negative_binomial, student, hierarchical]
)
def test_difference_takes_the_products_of_one_gradient(build):
    setup = Setup(build).compile(mode=Mode("py", "fast_run"))
    assert products_with_data(setup.evaluated) == 2
    assert products_with_data(setup.remembered) == 2


def test_checks_of_parameters_are_kept():
    def unbounded():
        normal(X @ b(), b("sigma", ()))

    setup = Setup(unbounded).compile()
    theta, _ = setup.positions(np.random.default_rng(5))
    theta["sigma"][...] = -1.0
    [terms] = setup.terms(*theta.values(), *setup.data([np.arange(N)]))
    assert np.isneginf(terms[:, 0]).all()
    theta["sigma"][...] = setup.point["sigma"][...] = 2.0
    setup.check(np.random.default_rng(5), 1e-10)


# --- What isn't cut


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_none_where_nothing_is_gained(build):
    assert Setup(build).rows is None


x, y, beta = pt.matrix("x"), pt.vector("y"), pt.vector("beta", shape=(D,))
eta = pt.dot(x, beta)
MIXING = {
    "mean of rows": y * (eta - eta.mean()),
    "mean of data": (y - y.mean()) * eta,
    "number of rows": y * eta / y.shape[0],
    "row index": pt.arange(y.shape[0]) * eta,
    "sort": pt.sort(eta) * y,
    "running sum": pt.cumsum(eta) * y,
    "reversed": eta[::-1] * y,
    "first row": eta * eta[0],
    "next row": pt.concatenate([eta[1:], eta[:1]]) * y,
    "shuffled": eta[pt.argsort(y)],
    "all pairs": pt.exp(eta[:, None] - eta[None, :]).sum(axis=1),
    "product of rows": (x @ x.T) @ eta,
    "softmax over rows": pt.special.softmax(eta, axis=0) * y,
    "largest of rows": pt.exp(eta - eta.max()),
    "wrong column": x[:, :3][pt.arange(y.shape[0]), 0] @ x * eta,
    "reshaped": pt.stack([eta, y]).reshape((y.shape[0], 2)).sum(axis=1),
    "scan": scan(lambda e, before: e + 0.5 * before, eta, pt.zeros(()), return_updates=False),
}


@pytest.mark.parametrize("name", MIXING)
def test_none_where_rows_may_be_mixed(name):
    point = {"beta": np.ones(D)}
    assert row_terms([y * eta], [beta], [[x, y]], point) is not None
    assert row_terms([MIXING[name]], [beta], [[x, y]], point) is None


def test_row_axes_follow_the_rows():
    rows, table = pt.lvector("rows"), pt.matrix("table")
    graphs = {
        x.T: 1,
        x.T[1:]: 1,
        x[:, 0]: 0,
        x.T[0]: 0,
        x.sum(axis=-1): 0,
        x.T.sum(axis=0): 0,
        pt.dot(table, x.T): 1,
        pt.stack([y, eta], axis=0): 1,
        table[rows]: 0,
        table[rows, rows]: 0,
        x[:, None, :]: 0,
        pt.ones((y.shape[0], 2)): 0,
        x[pt.arange(x.shape[0]), rows]: 0,
        table.sum(axis=0): None,
        x.sum(axis=0): MIXED,
        x[rows]: MIXED,
        table[pt.arange(y.shape[0])]: MIXED,
    }
    axes = row_axes(list(graphs), dict.fromkeys([x, y, rows], 0))
    assert [axes.get(graph) for graph in graphs] == list(graphs.values())
