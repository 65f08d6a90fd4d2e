"""From a model to its minibatches: valid models come out exact, all others are refused in words."""

import warnings

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from modes import FAST
from pymc.model.transform.optimization import freeze_dims_and_data
from pytensor.graph.basic import equal_computations

from pymc_sghmc.gradients.gradients import MinibatchGradient

N, D, G = 11, 3, 4  # rows, features, groups: all different, lengths that agree come in tests below
rng = np.random.default_rng(20)
X = rng.normal(size=(N, D))
Y = rng.normal(size=N)
Y_ROWS = rng.normal(size=(N, 2))
POSITIVE = rng.gamma(2.0, size=N)
UNIT = rng.uniform(0.1, 0.9, size=N)
COUNTS = rng.poisson(2.0, size=N)
BINARY = rng.integers(2, size=N)
GROUP = rng.integers(G, size=N)
ITEM = rng.integers(6, size=N)
TABLE = rng.normal(size=G)
SIMPLEX_ROWS = rng.dirichlet(np.ones(3), size=N)
COUNT_ROWS = rng.multinomial(6, np.ones(3) / 3, size=N)


def whole(*arrays):
    """Way 1: the model holds the arrays themselves."""
    return arrays if len(arrays) > 1 else arrays[0]


def in_batches(*arrays):
    """Way 2: the model holds pm.Minibatch of the arrays."""
    # PyMC 5.28 takes no other integers in an observed pm.Minibatch.
    arrays = [a.astype("int32") if a.dtype == np.int64 else a for a in arrays]
    return pm.Minibatch(*arrays, batch_size=4)


# --- The zoo. Each builds inside a model from ``rows``, either of the two above, and ``total``,
# the total_size that goes with it (None in way 1).


def constants(rows, total):
    x, y = rows(X, Y)
    b = pm.Normal("b", 0, 2, shape=D)
    sigma = pm.HalfNormal("sigma")
    pm.Normal("y", pt.dot(x, b), sigma, observed=y, total_size=total)


def data_containers(rows, total):
    x, y = rows(pm.Data("x", X), pm.Data("y_data", Y))
    b = pm.Normal("b", 0, 2, shape=D)
    pm.Normal("y", pt.dot(x, b), 0.7, observed=y, total_size=total)


def deterministics(rows, total):
    x, y = rows(X, Y)
    b = pm.Normal("b", 0, 2, shape=D)
    mu = pm.Deterministic("mu", pt.dot(x, b))
    scale = pm.Deterministic("scale", pt.exp(b[0]))
    pm.Deterministic("mean_of_batch", mu.mean())  # over rows, but in no log-density
    pm.Normal("y", mu, scale, observed=y, total_size=total)


def several_observed(rows, total):
    x, y, counts = rows(X, Y, COUNTS)
    b = pm.Normal("b", 0, 2, shape=D)
    pm.Normal("y", pt.dot(x, b), 1, observed=y, total_size=total)
    pm.Poisson("counts", pt.exp(pt.dot(x, b)), observed=counts, total_size=total)


def observed_given_observed(rows, total):
    y, after = rows(Y, Y + 1)
    b = pm.Normal("b")
    first = pm.Normal("first", b, 1, observed=y, total_size=total)
    pm.Normal("second", b * first, 2, observed=after, total_size=total)


def potential_without_rows(rows, total):
    x, y = rows(X, Y)
    b = pm.Normal("b", 0, 2, shape=D)
    pm.Potential("penalty", -pt.sum(b**4))
    pm.Potential("by_entry", -(b**2))
    pm.Normal("y", pt.dot(x, b), 1, observed=y, total_size=total)


def mvnormal_rows(rows, total):
    mu = pm.Normal("mu", shape=2)
    cov = np.array([[1.0, 0.3], [0.3, 2.0]])
    pm.MvNormal("y", mu, cov, observed=rows(Y_ROWS), total_size=total)


def lkj(rows, total):
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1))
    mu = pm.Normal("mu", shape=2)
    pm.MvNormal("y", mu, chol=chol, observed=rows(Y_ROWS), total_size=total)


def matrix_of_normals(rows, total):
    x, y = rows(X, Y_ROWS)
    B = pm.Normal("B", shape=(D, 2))
    pm.Normal("y", x @ B, pm.HalfNormal("sigma", shape=2), observed=y, total_size=total)


def multinomial(rows, total):
    x, y = rows(X, COUNT_ROWS)
    B = pm.Normal("B", shape=(D, 3))
    pm.Multinomial("y", n=6, p=pm.math.softmax(x @ B, -1), observed=y, total_size=total)


def dirichlet_multinomial(rows, total):
    a = pm.HalfNormal("a", shape=3)
    pm.DirichletMultinomial("y", n=6, a=a, observed=rows(COUNT_ROWS), total_size=total)


def dirichlet_rows(rows, total):
    a = pm.HalfNormal("a", shape=3)
    pm.Dirichlet("y", a=a, observed=rows(SIMPLEX_ROWS), total_size=total)


def bounded_unknowns(rows, total):
    w = pm.Dirichlet("w", np.ones(D))
    low = pm.Uniform("low", -3, 3)
    theta = pm.Beta("theta", 2, 2)
    x, y = rows(X, Y)
    pm.Normal("y", low + pt.dot(x, w), 0.5 + theta, observed=y, total_size=total)


def ordered_mixture(rows, total):
    mu = pm.Normal("mu", [-1, 1], 2, transform=pm.distributions.transforms.ordered, initval=[-1, 1])
    w = pm.Dirichlet("w", np.ones(2))
    pm.NormalMixture("y", w, mu, 0.8, observed=rows(Y), total_size=total)


def mixture_by_row(rows, total):
    x, y = rows(X, Y)
    b = pm.Normal("b", shape=D)
    parts = [pm.Normal.dist(pt.dot(x, b), 1), pm.StudentT.dist(nu=3, mu=0, sigma=2)]
    pm.Mixture("y", [0.3, 0.7], parts, observed=y, total_size=total)


def random_intercepts(rows, total):
    group, y = rows(GROUP, Y)
    mu, tau = pm.Normal("mu"), pm.HalfNormal("tau")
    a = pm.Normal("a", mu, tau, shape=G)
    pm.Normal("y", a[group], 1, observed=y, total_size=total)


def random_intercepts_non_centred(rows, total):
    x, group, y = rows(pm.Data("x", X), pm.Data("group", GROUP), pm.Data("y_data", Y))
    mu, tau = pm.Normal("mu"), pm.HalfNormal("tau")
    z = pm.Normal("z", shape=G)
    slopes = pm.Normal("slopes", shape=(G, D))
    a = pm.Deterministic("a", mu + tau * z)
    predictor = a[group] + (x * slopes[group]).sum(axis=-1)
    pm.Normal("y", predictor, pm.HalfNormal("sigma"), observed=y, total_size=total)


def bernoulli(rows, total):
    x, y = rows(X, BINARY)
    b = pm.Normal("b", shape=D)
    pm.Bernoulli("y", logit_p=pt.dot(x, b), observed=y, total_size=total)


def negative_binomial(rows, total):
    x, y = rows(X, COUNTS)
    b = pm.Normal("b", shape=D)
    mu, alpha = pt.exp(pt.dot(x, b)), pm.Gamma("alpha", 2, 1)
    pm.NegativeBinomial("y", mu=mu, alpha=alpha, observed=y, total_size=total)


def poisson_with_exposure(rows, total):
    exposure, y = rows(POSITIVE, COUNTS)
    pm.Poisson("y", exposure * pm.Gamma("rate", 2, 1), observed=y, total_size=total)


def zero_inflated(rows, total):
    psi, mu = pm.Beta("psi", 2, 2), pm.Gamma("mu", 2, 1)
    pm.ZeroInflatedPoisson("y", psi, mu, observed=rows(COUNTS), total_size=total)


def student_t(rows, total):
    nu = pm.Gamma("nu", 3, 1)
    pm.StudentT("y", nu=nu, mu=pm.Normal("mu"), sigma=1, observed=rows(Y), total_size=total)


def beta_regression(rows, total):
    x, y = rows(X, UNIT)
    mu = pm.math.invlogit(pt.dot(x, pm.Normal("b", shape=D)))
    pm.Beta("y", mu=mu, nu=pm.Gamma("nu", 3, 0.1), observed=y, total_size=total)


def categorical(rows, total):
    x, y = rows(X, GROUP)
    B = pm.Normal("B", shape=(D, G))
    pm.Categorical("y", logit_p=x @ B, observed=y, total_size=total)


def ordered_logistic(rows, total):
    x, y = rows(X, GROUP)
    cuts = pm.Normal(
        "cuts",
        [-1, 0, 1],
        1,
        transform=pm.distributions.transforms.ordered,
        initval=[-1, 0, 1],
    )
    eta = pt.dot(x, pm.Normal("b", shape=D))
    pm.OrderedLogistic("y", eta, cuts, observed=y, total_size=total)


def censored(rows, total):
    x, upper, y = rows(X, POSITIVE, np.minimum(Y, POSITIVE))
    latent = pm.Normal.dist(pt.dot(x, pm.Normal("b", shape=D)), pm.HalfNormal("sigma"))
    pm.Censored("y", latent, lower=None, upper=upper, observed=y, total_size=total)


def truncated(rows, total):
    latent = pm.Normal.dist(pm.Normal("mu"), 1)
    pm.Truncated("y", latent, lower=0, upper=None, observed=rows(POSITIVE), total_size=total)


def custom_logp(rows, total):
    def logp(value, mu):
        return -(pt.abs(value - mu) ** 1.5)

    x, y = rows(X, Y)
    mu = pt.dot(x, pm.Normal("b", shape=D))
    pm.CustomDist("y", mu, logp=logp, observed=y, total_size=total)


def custom_dist(rows, total):
    def dist(mu, size):
        return pt.exp(pm.Normal.dist(mu, 1, size=size))

    y = rows(POSITIVE)
    pm.CustomDist("y", pm.Normal("mu"), dist=dist, observed=y, total_size=total)


def interpolated_by_index(rows, total):
    # An array that is not on the rows is indexed by one that is.
    group, y = rows(GROUP, Y)
    table = pm.Data("table", TABLE)
    pm.Normal("y", pm.Normal("b") * pt.as_tensor(table)[group], 1, observed=y, total_size=total)


def switches(rows, total):
    x, y = rows(X[:, 0], Y)
    cut, levels = pm.Normal("cut"), pm.Normal("levels", shape=2)
    pm.Normal("y", pt.switch(x < cut, levels[0], levels[1]), 1, observed=y, total_size=total)


def neural_network(rows, total):
    x, y = rows(X, BINARY)
    w1, w2 = pm.Normal("w1", shape=(D, 5)), pm.Normal("w2", shape=5)
    hidden = pt.tanh(x @ w1 + pm.Normal("bias", shape=5))
    pm.Bernoulli("y", logit_p=hidden @ w2, observed=y, total_size=total)


def matrix_factorisation(rows, total):
    user, item, y = rows(GROUP, ITEM, Y)
    U, V = pm.Normal("U", shape=(G, 2)), pm.Normal("V", shape=(6, 2))
    pm.Normal("y", (U[user] * V[item]).sum(-1), 1, observed=y, total_size=total)


ZOO = [
    constants,
    data_containers,
    deterministics,
    several_observed,
    observed_given_observed,
    potential_without_rows,
    mvnormal_rows,
    lkj,
    matrix_of_normals,
    multinomial,
    dirichlet_multinomial,
    dirichlet_rows,
    bounded_unknowns,
    ordered_mixture,
    mixture_by_row,
    random_intercepts,
    random_intercepts_non_centred,
    bernoulli,
    negative_binomial,
    poisson_with_exposure,
    zero_inflated,
    student_t,
    beta_regression,
    categorical,
    ordered_logistic,
    censored,
    truncated,
    custom_logp,
    custom_dist,
    interpolated_by_index,
    switches,
    neural_network,
    matrix_factorisation,
]
IN_BATCHES = [
    constants,
    data_containers,
    deterministics,
    several_observed,
    observed_given_observed,
    potential_without_rows,
    lkj,
    matrix_of_normals,
    multinomial,
    mixture_by_row,
    random_intercepts_non_centred,
    categorical,
    censored,
    custom_logp,
    interpolated_by_index,
]


# --- Models of way 1 alone: what the ordinary user writes that no batch could have.


def dims_and_coords():
    with pm.Model(coords={"row": np.arange(N), "feature": list("abc")}) as model:
        x = pm.Data("x", X, dims=("row", "feature"))
        y = pm.Data("y_data", Y, dims="row")
        b = pm.Normal("b", dims="feature")
        mu = pm.Deterministic("mu", x @ b, dims="row")
        pm.Normal("y", mu, 1, observed=y, dims="row")
    return model


def dims_with_frozen_data():
    return freeze_dims_and_data(dims_and_coords())


def observed_afterwards():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu"), 1, shape=N)
    return pm.observe(model, {"y": Y})


def prefixed_by_a_name():
    with pm.Model(name="outer") as model:
        constants(whole, None)
    return model


def pandas_input():
    frame = pd.DataFrame(X, columns=list("abc")).assign(y=Y)
    with pm.Model() as model:
        b = pm.Normal("b", shape=D)
        x = pm.Data("x", frame[["a", "b", "c"]])
        pm.Normal("y", pt.dot(x, b) + frame["a"].to_numpy(), 1, observed=frame["y"])
    return model


def masked_without_missing():
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyMC's remark that nothing is masked
        pm.Normal("y", pm.Normal("mu"), 1, observed=np.ma.masked_invalid(Y))
    return model


def total_size_without_minibatch():
    with pm.Model() as model:
        constants(whole, N)
    return model


def integers_as_predictors():
    with pm.Model() as model:
        mu = pm.Normal("mu") * pm.Data("k", COUNTS) + pt.as_tensor(GROUP)
        pm.Normal("y", mu, 1, observed=COUNTS)  # integers observed as floats
    return model


def shape_of_likelihood():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu"), pm.HalfNormal("sigma"), shape=N, observed=Y)
    return model


def zeros_and_ones():
    with pm.Model() as model:
        b = pm.Normal("b", shape=D)
        mu = pt.dot(pm.Data("x", X), b) + pt.zeros(N) + pt.ones((N, 2)) @ b[:2]
        pm.Normal("y", mu, pt.full((N,), 1.3), observed=pm.Data("y_data", Y))
    return model


def broadcast_and_reshaped():
    with pm.Model() as model:
        x, b = pm.Data("x", X), pm.Normal("b", shape=D)
        mu = pt.broadcast_to(b, (N, D)) * x + x.reshape((N, D)) * pt.exp(b)
        pairs = pt.concatenate([x, x**2], axis=1)
        mu += pairs.reshape((N, 2, x.shape[1])).prod(axis=1) * b**2  # lengths of two kinds
        sigma = pt.specify_shape(x, (N, D)).reshape((N, -1))[:, 0] ** 2 + 1
        pm.Normal("y", mu.sum(axis=1), sigma, observed=Y)
    return model


def shapes_from_dims():
    with pm.Model(coords={"row": range(N)}) as model:
        length = model.dim_lengths["row"]
        mu = pt.zeros(length) + pt.ones((length, 1))[:, 0] * pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=pm.Data("y_data", Y, dims="row"), dims="row")
    return model


def bias_column():
    with pm.Model() as model:
        b = pm.Normal("b", shape=D + 1)
        x = pt.concatenate([pt.ones((N, 1)), pm.Data("x", X)], axis=1)
        pm.Normal("y", x @ b, 1, observed=Y)
    return model


def one_column():
    with pm.Model() as model:
        b = pm.Normal("b", shape=(1, 1))
        pm.Normal("y", X[:, :1] @ b, 1, observed=Y[:, None])
    return model


def latent_of_length_one():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu", shape=1), 1, observed=Y)
    return model


def scalar_observed_kept_whole():
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=Y)
        pm.Normal("scalar", mu, 0.5, observed=0.3)
    return model


def time_series_kept_whole():
    with pm.Model() as model:
        rho = pm.Normal("rho", 0, 0.3)
        pm.AR("series", [0.0, rho], observed=Y[:7], init_dist=pm.Normal.dist(), constant=True)
        pm.Normal("y", rho, 1, observed=Y)
    return model


def data_of_another_length_kept_whole():
    # The penalty reads data, but none of those that are cut.
    with pm.Model() as model:
        b = pm.Normal("b", shape=D)
        pm.Potential("penalty", -pt.sum((b - pm.Data("centre", np.ones(D))) ** 2))
        pm.Normal("y", pt.dot(X, b), 1, observed=Y)
    return model


def approximate_gaussian_process():
    with pm.Model() as model:
        cov = pm.gp.cov.ExpQuad(1, ls=pm.Gamma("ls", 2, 1))
        gp = pm.gp.HSGP(m=[4], c=2.0, cov_func=cov)
        pm.Normal("y", gp.prior("f", X=pm.Data("x", X[:, :1])), 1, observed=Y)
    return model


def centred_by_the_full_data():
    # The batch is cut; the array that it is drawn from is not.
    with pm.Model() as model:
        table = pm.Data("x", X)
        x, y = pm.Minibatch(table, Y, batch_size=4)
        b = pm.Normal("b", shape=D)
        pm.Normal("y", (x - table.mean(axis=0)) @ b, 1, observed=y, total_size=N)
    return model


def lagged_beforehand():
    # Given the past as a column of its own, the rows are independent.
    with pm.Model() as model:
        mu = pm.Normal("rho") * pm.Data("before", Y[:-1])
        pm.Normal("y", mu, 1, observed=pm.Data("after", Y[1:]))
    return model


def rows_are_series():
    with pm.Model() as model:
        rho = pm.Normal("rho", 0, 0.3)
        pm.AR("y", [rho], observed=rng.normal(size=(N, 5)), init_dist=pm.Normal.dist())
    return model


def as_many_features_as_rows():
    with pm.Model() as model:
        b = pm.Normal("b", shape=N)
        pm.Normal("y", pt.dot(rng.normal(size=(N, N)), b), 1, observed=Y)
    return model


def as_many_groups_as_rows():
    with pm.Model() as model:
        a = pm.Normal("a", shape=N)
        pm.Normal("y", a[rng.integers(N, size=N)], 1, observed=Y)
    return model


def as_many_columns_as_rows():
    with pm.Model() as model:
        mu = pm.Normal("mu", shape=N)
        pm.Normal("y", mu, 1, observed=rng.normal(size=(N, N)))
    return model


def table_with_dims_of_its_own():
    # As long as the data, told apart by its dim.
    with pm.Model(coords={"row": range(N), "group": range(N)}) as model:
        table = pm.Data("table", rng.normal(size=N), dims="group")
        mu = pm.Normal("b") * table[pm.Data("index", np.arange(N) % 4, dims="row")]
        pm.Normal("y", mu, 1, observed=pm.Data("y_data", Y, dims="row"))
    return model


def one_array_used_twice():
    with pm.Model() as model:
        x = pm.Data("x", X)
        b = pm.Normal("b", shape=D)
        pm.Normal("y", x @ b, pt.exp(x[:, 0] * b[1]), observed=x[:, 2])
    return model


def standardised_constants():
    # Of constants PyMC makes a constant: the full data's mean, which is right.
    with pm.Model() as model:
        x = pt.as_tensor(X)
        b = pm.Normal("b", shape=D)
        pm.Normal("y", (x - x.mean(axis=0)) @ b, 1, observed=Y)
    return model


def row_numbers():
    # PyMC makes a constant of these, too, so that each row keeps its number.
    with pm.Model() as model:
        mu = pm.Normal("b") * pt.arange(N)
        pm.Normal("y", mu, 1, observed=pm.Data("y_data", Y))
    return model


def scan_by_row():
    with pm.Model() as model:
        x, b = pm.Data("x", X), pm.Normal("b", shape=D)
        pm.Normal("y", scan_output(pytensor.map, lambda row, b: row @ b, [x], [b]), 1, observed=Y)
    return model


def einstein_sum():
    with pm.Model() as model:
        mu = pt.einsum("nd,d->n", pm.Data("x", X), pm.Normal("b", shape=D))
        mu += pt.einsum("nd,dk->nk", X, pm.Normal("B", shape=(D, 2))).sum(axis=-1)
        pm.Normal("y", mu, 1, observed=Y)
    return model


def helpers_of_pymc():
    # Each is built for static shapes in some version of PyTensor.
    with pm.Model() as model:
        eta = X @ pm.Normal("B", shape=(D, 2))
        mu = pm.math.logsumexp(eta, axis=-1) + pt.special.log_softmax(eta, axis=-1)[:, 0]
        mu += pm.math.logaddexp(eta[:, 0], eta[:, 1])
        mu += pt.diagonal(eta[:, :, None] * eta[:, None, :], axis1=1, axis2=2).prod(axis=-1)
        mu += pt.expand_dims(eta, 0).squeeze(0).max(axis=1) + pt.sort(eta, axis=-1)[:, 0]
        mu += pt.stack([eta, eta**2]).sum(axis=(0, 2)) + pt.tile(eta, (1, 3)).sum(axis=1)
        pm.Normal("y", mu, 1, observed=Y)
    return model


WAY_ONE = [
    dims_and_coords,
    dims_with_frozen_data,
    observed_afterwards,
    prefixed_by_a_name,
    pandas_input,
    masked_without_missing,
    total_size_without_minibatch,
    integers_as_predictors,
    shape_of_likelihood,
    zeros_and_ones,
    broadcast_and_reshaped,
    shapes_from_dims,
    bias_column,
    one_column,
    latent_of_length_one,
    scalar_observed_kept_whole,
    time_series_kept_whole,
    data_of_another_length_kept_whole,
    approximate_gaussian_process,
    lagged_beforehand,
    rows_are_series,
    as_many_features_as_rows,
    as_many_groups_as_rows,
    as_many_columns_as_rows,
    table_with_dims_of_its_own,
    one_array_used_twice,
    standardised_constants,
    row_numbers,
    scan_by_row,
    einstein_sum,
    helpers_of_pymc,
]


def scan_output(scan, step, sequences, non_sequences, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTensor 3 announces that updates will go
        result = scan(step, sequences=sequences, non_sequences=non_sequences, **kwargs)
    return result[0] if isinstance(result, tuple | list) else result


def build(make, *args):
    with pm.Model() as model:
        make(*args)
    return model


def compiled(model):
    outputs = [model.logp(), model.dlogp()]
    return model.compile_fn(outputs, inputs=model.value_vars, point_fn=False, **FAST)


def random_point(model, scale=0.4, seed=3):
    """Values of the unknowns, and the same raveled."""
    rng = np.random.default_rng(seed)
    start = model.initial_point()
    values = [
        np.asarray(start[v.name] + scale * rng.normal(size=start[v.name].shape), dtype=v.dtype)
        for v in model.value_vars
    ]
    return values, np.concatenate([value.ravel() for value in values])


def mean_over_rows(gradient, position):
    """Mean over all minibatches, from those of one row: both are linear in the rows."""
    first = [np.array([0]) for _ in gradient.n_rows]
    base = [np.array(out, dtype=float) for out in gradient(position, first)]
    total = list(base)
    for k, n_rows in enumerate(gradient.n_rows):
        results = [
            gradient(position, (*first[:k], np.array([i]), *first[k + 1 :])) for i in range(n_rows)
        ]
        for j in range(2):
            total[j] = total[j] + np.mean([r[j] for r in results], axis=0) - base[j]
    return total


def check_exact(model, full_model, batch_size, rtol=1e-10, n_groups=1):
    """The mean of all minibatch gradients is the model's own, and the model stays as it was."""
    names = [v.name for v in (*model.basic_RVs, *model.deterministics, *model.value_vars)]
    full = compiled(full_model)
    graph = model.logp(vars=[*model.observed_RVs, *model.potentials])
    values, position = random_point(model)
    before = full(*values)
    gradient = MinibatchGradient(
        model, model.continuous_value_vars, batch_size, compile_kwargs=FAST
    )
    assert len(gradient.groups) == n_groups
    logp, grad = mean_over_rows(gradient, position)
    scale = abs(before[1]).max()
    np.testing.assert_allclose(logp, before[0], rtol=rtol)
    np.testing.assert_allclose(grad, before[1], rtol=rtol, atol=rtol * scale)

    assert names == [v.name for v in (*model.basic_RVs, *model.deterministics, *model.value_vars)]
    assert equal_computations([graph], [model.logp(vars=[*model.observed_RVs, *model.potentials])])
    after = full(*values)
    np.testing.assert_array_equal(after[1], before[1])
    return gradient


@pytest.mark.parametrize("make", ZOO)
def test_full_data_model_has_exact_mean(make):
    model = build(make, whole, None)
    check_exact(model, model, batch_size=4)


@pytest.mark.parametrize("make", IN_BATCHES)
def test_pm_minibatch_model_has_exact_mean(make):
    gradient = check_exact(build(make, in_batches, N), build(make, whole, None), None)
    assert gradient.groups[0].batch_size == 4


@pytest.mark.parametrize("make", WAY_ONE)
def test_model_as_users_write_it_has_exact_mean(make):
    model = make()
    check_exact(model, model, batch_size=4)


def test_full_data_beside_pm_minibatch_stay_whole():
    with pm.Model() as full_model:
        pm.Normal("y", (X - X.mean(axis=0)) @ pm.Normal("b", shape=D), 1, observed=Y)
    check_exact(centred_by_the_full_data(), full_model, None)


@pytest.mark.parametrize("make", [data_containers, random_intercepts_non_centred, student_t])
@pytest.mark.parametrize("rows", [whole, in_batches])
def test_single_precision_model_has_exact_mean(make, rows):
    with pytensor.config.change_flags(floatX="float32", warn_float64="raise"):
        data = {name: globals()[name] for name in ("X", "Y")}
        try:
            for name, array in data.items():
                globals()[name] = array.astype("float32")
            model = build(make, rows, None if rows is whole else N)
            full_model = build(make, whole, None)
        finally:
            globals().update(data)
        batch_size = 4 if rows is whole else None
        gradient = check_exact(model, full_model, batch_size, rtol=3e-5)
        _, position = random_point(model)
        minibatch = gradient.draw_minibatch(np.random.default_rng(1))
        assert [out.dtype for out in gradient(position, minibatch)] == [np.float32] * 2


# --- Several groups of rows


def two_tables():
    """Likelihoods of 11 and 7 rows share their unknowns."""
    with pm.Model(coords={"row": range(N), "other": range(7)}) as model:
        b = pm.Normal("b", shape=D)
        x = pm.Data("x", X, dims=("row", "feature"))
        pm.Normal("y", x @ b, 1, observed=Y, dims="row")
        x_other = pm.Data("x_other", X[:7] + 1)
        pm.Poisson("counts", pt.exp(x_other @ b), observed=COUNTS[:7], dims="other")
    return model


@pytest.mark.parametrize(
    "batch_size, n_groups",
    [
        ({"y": 4, "counts": 3}, 2),
        ({"row": 4, "other": 3}, 2),
        ({"x": 4, "x_other": 3}, 2),
        ({"x": 4, "row": 4, "y": 4}, 1),  # other names for the same rows; "counts" is used whole
        ({"counts": 7}, 1),
    ],
)
def test_groups_of_rows_have_exact_mean(batch_size, n_groups):
    model = two_tables()
    gradient = check_exact(model, model, batch_size, n_groups=n_groups)
    assert [g.batch_size for g in gradient.groups] == list(batch_size.values())[:n_groups]


def test_groups_of_pm_minibatch_keep_their_sizes():
    def make(first, second):
        with pm.Model() as model:
            mu = pm.Normal("mu")
            y = pm.Minibatch(Y, batch_size=4) if first else Y
            z = pm.Minibatch(POSITIVE[:7], batch_size=3) if second else POSITIVE[:7]
            pm.Normal("y", mu, 1, observed=y, total_size=N if first else None)
            pm.Normal("z", mu, 2, observed=z, total_size=7 if second else None)
        return model

    full_model = make(False, False)
    gradient = check_exact(make(True, True), full_model, None, n_groups=2)
    assert sorted(g.batch_size for g in gradient.groups) == [3, 4]
    gradient = check_exact(make(True, True), full_model, {"z": 2}, n_groups=2)
    assert sorted(g.batch_size for g in gradient.groups) == [2, 4]
    # A likelihood without pm.Minibatch stays whole.
    check_exact(make(True, False), full_model, None, n_groups=1)


def test_arrays_of_one_minibatch_are_cut_by_the_same_rows():
    # Each row says exp(b x) with its own x: rows of x and y that don't belong together show.
    with pm.Model() as model:
        b = pm.Normal("b")
        x, y = pm.Data("x", np.arange(5.0)), pm.Data("y_data", 10.0 ** np.arange(5))
        pm.Normal("y", b * x, 1, observed=y)
    gradient = MinibatchGradient(model, model.value_vars, 2, compile_kwargs=FAST)
    b = np.array([0.3])
    _, grad = gradient(b, (np.array([3, 1]),))
    x, y = np.array([3.0, 1.0]), np.array([1000.0, 10.0])
    np.testing.assert_allclose(grad, -b + 5 / 2 * np.sum(x * (y - b * x)), rtol=1e-12)


def test_int_is_enough_for_equal_row_counts():
    with pm.Model(coords={"row": range(N), "other": range(N)}) as model:
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=Y, dims="row")
        pm.Normal("z", mu, 1, observed=POSITIVE, dims="other")
    check_exact(model, model, 4)


def test_no_batch_size_uses_all_data():
    model = build(data_containers, whole, None)
    gradient = check_exact(model, model, None, n_groups=0)
    assert gradient.is_exact


@pytest.mark.parametrize("batch_size", [None, 4])
def test_variables_that_are_listed_twice_count_once(batch_size):
    # sample_posterior_predictive of PyMC 5.28 leaves the observed variables twice in its list.
    model, full_model = (build(several_observed, whole, None) for _ in range(2))
    values, position = random_point(model)
    model.observed_RVs.extend(model.observed_RVs[:])
    gradient = MinibatchGradient(
        model, model.continuous_value_vars, batch_size, compile_kwargs=FAST
    )
    logp, grad = mean_over_rows(gradient, position)
    expected = compiled(full_model)(*values)
    np.testing.assert_allclose(logp, expected[0], rtol=1e-10)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-10)


def test_pm_minibatch_in_a_deterministic_alone_is_no_minibatch():
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Deterministic("some", mu * pm.Minibatch(Y, batch_size=2))
        pm.Normal("y", mu, 1, observed=Y)
    check_exact(model, model, None, n_groups=0)


# --- Refusals: each names what is wrong and the way out.


def refusal(model, batch_size, *parts):
    with pytest.raises(ValueError) as error:
        MinibatchGradient(model, model.continuous_value_vars, batch_size, compile_kwargs=FAST)
    for part in parts:
        assert part in str(error.value)


def mean_over_rows_in_model():
    x, b = pm.Data("x", X), pm.Normal("b", shape=D)
    pm.Normal("y", (x - x.mean(axis=0)) @ b, 1, observed=Y)


def standardised_outcome():
    y = pm.Data("y_data", Y)
    pm.Normal("y", pm.Normal("b"), pt.std(y), observed=y)


def cumulative_sum():
    x, b = pm.Data("x", X), pm.Normal("b", shape=D)
    pm.Normal("y", pt.cumsum(x @ b), 1, observed=Y)


def shifted_series():
    y = pm.Data("y_data", Y)
    before = pt.concatenate([[0.0], y[:-1]])
    pm.Normal("y", pm.Normal("rho") * before, 1, observed=y)


def rolled_series():
    y = pm.Data("y_data", Y)
    pm.Normal("y", pm.Normal("rho") * pt.roll(y, 1), 1, observed=y)


def trend_by_position():
    y = pm.Data("y_data", Y)
    pm.Normal("y", pm.Normal("slope") * pt.arange(y.shape[0]), 1, observed=y)


def weight_by_row_count():
    x = pm.Data("x", X)
    pm.Normal("y", x @ pm.Normal("b", shape=D), pt.sqrt(x.shape[0]), observed=Y)


def maximum_of_binary():
    k = pm.Data("k", np.where(np.arange(N) == 4, 1.0, 0.0))
    pm.Normal("y", pm.Normal("b") * (1 - k.max()) + k, 1, observed=Y)


def recursion_by_scan():
    x, b = pm.Data("x", Y), pm.Normal("b")

    def step(value, previous, b):
        return value + b * previous

    mu = scan_output(pytensor.scan, step, [x], [b], outputs_info=pt.zeros(()))
    pm.Normal("y", mu, 1, observed=Y)


def row_data_on_two_axes():
    x, b = pm.Data("x", X), pm.Normal("b", shape=D)
    pm.Normal("y", x @ x.T @ x @ b, 1, observed=Y)


def table_as_long_as_the_data():
    # With an index that exists in every batch, the first row passes for the first group.
    table = pm.Data("table", rng.normal(size=N))
    pm.Normal("y", pm.Normal("b") * table[np.zeros(N, dtype=int)], 1, observed=Y)


def zeros_as_placeholders():
    # The mean of zeros depends on no row, that of the data to come does.
    x, b = pm.Data("x", np.zeros((N, D))), pm.Normal("b", shape=D)
    pm.Normal("y", (x - x.mean(axis=0)) @ b, 1, observed=pm.Data("y_data", np.zeros(N)))


def identical_rows():
    x, b = pm.Data("x", np.ones(N)), pm.Normal("b")
    pm.Normal("y", b * pt.cumsum(x) / pt.cumsum(pt.ones_like(x)), 1, observed=Y)


def all_zero_at_the_start():
    # b = 0 where the sampler starts, and everything it multiplies is invisible there.
    x, b = pm.Data("x", X), pm.Normal("b", initval=0.0)
    pm.Normal("y", b * x.sum(), 1, observed=Y)


def one_row_in_many():
    # Only the whole data show it: a few rows don't contain the one that matters.
    k = pm.Data("k", np.arange(3000) == 1234)
    pm.Normal("y", pm.Normal("b") * pt.any(k), 1, observed=np.zeros(3000))


def all_rows_but_a_few():
    # Only a minibatch of very few rows shows it.
    k = pm.Data("k", np.arange(N) % 5 > 0)
    pm.Normal("y", pm.Normal("b") * pt.any(k), 1, observed=Y)


NOT_INDEPENDENT = [
    one_row_in_many,
    all_rows_but_a_few,
    mean_over_rows_in_model,
    standardised_outcome,
    cumulative_sum,
    shifted_series,
    rolled_series,
    trend_by_position,
    weight_by_row_count,
    maximum_of_binary,
    recursion_by_scan,
    row_data_on_two_axes,
    table_as_long_as_the_data,
    zeros_as_placeholders,
    identical_rows,
    all_zero_at_the_start,
]


@pytest.mark.parametrize("make", NOT_INDEPENDENT)
def test_rows_in_company_are_refused(make):
    parts = "rows of 'y' are not independent", "compute it from the full data beforehand"
    refusal(build(make), 4, *parts)


@pytest.mark.parametrize("make", [mean_over_rows_in_model, cumulative_sum, shifted_series])
def test_rows_in_company_are_refused_in_large_data(make, monkeypatch):
    # Where all rows are too many for the check, it takes some.
    monkeypatch.setattr("pymc_sghmc.models.independence.MAX_CHECKED_ROWS", 6)
    refusal(build(make), 4, "rows of 'y' are not independent")


def test_mean_over_pm_minibatch_is_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X, Y, batch_size=4)
        b = pm.Normal("b", shape=D)
        pm.Normal("y", (x - x.mean(axis=0)) @ b, 1, observed=y, total_size=N)
    refusal(model, None, "rows of 'y' are not independent", "beforehand")


def autoregression():
    rho = pm.Normal("rho")
    pm.AR("y", [rho], observed=Y, init_dist=pm.Normal.dist())


def random_walk():
    pm.GaussianRandomWalk("y", sigma=pm.HalfNormal("s"), init_dist=pm.Normal.dist(), observed=Y)


def gaussian_process():
    gp = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(1, pm.HalfNormal("ls")))
    gp.marginal_likelihood("y", X[:, :1], Y, sigma=0.5)


def mvnormal_over_rows():
    pm.MvNormal("y", pt.zeros(N), pt.eye(N) * pm.HalfNormal("s"), observed=Y)


def scalars():
    pm.Normal("y", pm.Normal("mu"), 1, observed=0.7)


def no_data():
    pm.Normal("mu")


@pytest.mark.parametrize(
    "make", [autoregression, random_walk, gaussian_process, mvnormal_over_rows, scalars, no_data]
)
def test_likelihood_without_rows_is_refused(make):
    refusal(build(make), 4, "batch_size=4", "no likelihood", "Leave batch_size out", "NUTS")


def unknown_by_row():
    pm.Normal("y", pm.Normal("z", shape=N), 1, observed=Y)


def unknown_by_row_with_index():
    # PyMC 6 drops an index that is the identity; a Data index would be exact.
    pm.Normal("y", pm.Normal("z", shape=N)[np.arange(N)], 1, observed=Y)


def unknown_by_row_with_prior_from_data():
    z = pm.Normal("z", pt.dot(pm.Data("x", X), pm.Normal("b", shape=D)), 1, shape=N)
    pm.Normal("y", z, 1, observed=Y)


@pytest.mark.parametrize("make", [unknown_by_row, unknown_by_row_with_prior_from_data])
def test_unknown_by_row_is_refused(make):
    refusal(build(make), 4, "'z'", "one entry per row", "Marginalise")


def test_unknown_by_row_of_pm_minibatch_is_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X[:, 0], Y, batch_size=4)
        z = pm.Normal("z", pm.Normal("b") * x, 1, shape=4)
        pm.Normal("y", z, 1, observed=y, total_size=N)
    refusal(model, None, "'z'", "pm.Minibatch", "Marginalise")


def test_prior_from_row_data_is_refused():
    with pm.Model() as model:
        y = pm.Data("y_data", Y)
        mu = pm.Normal("mu", y.mean(), 1)
        pm.Normal("y", mu, 1, observed=y)
    refusal(model, 4, "'mu'", "prior", "y_data", "beforehand")


def test_potential_over_rows_is_refused():
    with pm.Model() as model:
        x, b = pm.Data("x", X), pm.Normal("b", shape=D)
        pm.Potential("weights", pt.sum(x @ b))
        pm.Normal("y", x @ b, 1, observed=Y)
    refusal(model, 4, "pm.Potential('weights')", "(x)", "pm.CustomDist")


def test_potential_over_pm_minibatch_is_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X, Y, batch_size=4)
        b = pm.Normal("b", shape=D)
        pm.Potential("weights", pt.sum(x @ b))
        pm.Normal("y", x @ b, 1, observed=y, total_size=N)
    refusal(model, None, "pm.Potential('weights')", "pm.CustomDist")


def rows_on_second_axis():
    pm.Normal("y", pm.Data("x", X.T).T @ pm.Normal("b", shape=D), 1, observed=Y)


def flattened_rows():
    x = pm.Data("x", X.ravel()).reshape((N, D))
    pm.Normal("y", x @ pm.Normal("b", shape=D), 1, observed=Y)


def halves_joined():
    x = pt.concatenate([pm.Data("x1", X[:5]), pm.Data("x2", X[5:])])
    pm.Normal("y", x @ pm.Normal("b", shape=D), 1, observed=Y)


def repeated_groups():
    a = pm.Normal("a", shape=2)
    pm.Normal("y", pt.repeat(a, pm.Data("times", [5, 6])), 1, observed=Y)


def column_against_row():
    # PyMC broadcasts (N,) against (N, 1) to N × N log-densities.
    y = pm.Data("y_data", Y[:, None])
    pm.Normal("y", pm.Normal("b") * pm.Data("x", X[:, 0]), 1, observed=y)


def lagged_in_the_model():
    y = pm.Data("y_data", Y)
    pm.Normal("y", pm.Normal("rho") * y[:-1], 1, observed=y[1:])


@pytest.mark.parametrize(
    "make",
    [
        rows_on_second_axis,
        flattened_rows,
        halves_joined,
        repeated_groups,
        column_against_row,
        lagged_in_the_model,
    ],
)
def test_data_in_another_order_are_refused(make):
    refusal(build(make), 4, "'y'", "can't be evaluated on some of its", "leading axis")


def test_transposed_outcome_is_refused():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu", shape=N), 1, observed=Y_ROWS.T)
    refusal(model, 4, "batch_size=4", "between 1 and the 2 rows")


def test_array_with_another_dim_is_named_in_the_refusal():
    with pm.Model(coords={"row": range(N), "line": range(N)}) as model:
        x = pm.Data("x", X[:, 0], dims="line")
        pm.Normal("y", pm.Normal("b") * x, 1, observed=Y, dims="row")
    refusal(model, 4, "'x'", "another leading dim", "'row'")


def test_equal_observations_on_other_rows_are_told_apart():
    # PyTensor merges the two constants into one, which has the name of one of them.
    with pm.Model(coords={"row": range(N), "line": range(N)}) as model:
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=Y, dims="row")
        pm.Normal("z", mu * pm.Data("x", X[:, 0], dims="line"), 1, observed=Y.copy(), dims="line")
    check_exact(model, model, 4)


def test_imputed_rows_are_refused():
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyMC announces the imputation
        pm.Normal("y", pm.Normal("mu"), 1, observed=np.ma.masked_greater(Y, 0.5))
    refusal(model, 2, "'y'", "missing values", "Drop the rows")


def test_imputed_rows_may_be_kept_whole():
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=np.ma.masked_greater(Y, 0.5))
        pm.Normal("z", mu, 1, observed=POSITIVE)
    check_exact(model, model, {"z": 4})


@pytest.mark.parametrize(("value", "words"), [(np.nan, "missing"), (np.inf, "infinite")])
@pytest.mark.parametrize("rows", [whole, in_batches])
def test_data_that_are_no_numbers_are_named(rows, value, words):
    x = X[:, 0].copy()
    x[3] = value
    with pm.Model() as model:
        x, y = rows(x, Y)
        pm.Normal("y", pm.Normal("b") * x, 1, observed=y, total_size=None if rows is whole else N)
    refusal(model, 4, "'y' is not finite", f"has {words} values. Drop these rows")


def test_infinite_likelihood_is_refused():
    # Nothing can be seen in rows that are infinite or not numbers wherever one looks.
    with pm.Model() as model:
        x = pm.Data("x", X)
        pm.Exponential("y", pt.exp(pm.Normal("b") * x.mean()), observed=-POSITIVE)
    refusal(model, 4, "'y'", "infinite or not a number", "initval", "model.debug()")


def test_likelihood_finite_only_near_the_start_is_checked_there():
    def make(scale):
        with pm.Model() as model:
            x, width = pm.Data("x", POSITIVE), pm.LogNormal("width", 0, 10, initval=1.0)
            # finite while width > 0.99
            width = width * (x.mean() if scale else 1.0)
            pm.Uniform("y", -width, width, observed=0.98 * np.cos(np.arange(N)))
        return model

    MinibatchGradient(make(False), make(False).value_vars, 4, compile_kwargs=FAST)
    with pytest.raises(ValueError, match=r"independent|infinite"):
        MinibatchGradient(make(True), make(True).value_vars, 4, compile_kwargs=FAST)


def minibatch_model(total_size):
    with pm.Model() as model:
        x, y = pm.Minibatch(X, Y, batch_size=4)
        b = pm.Normal("b", shape=D)
        pm.Normal("y", x @ b, 1, observed=y, total_size=total_size)
    return model


def test_minibatch_without_total_size_is_refused():
    with pytest.warns(UserWarning, match="total_size not provided"):  # PyMC's
        model = minibatch_model(None)
    refusal(model, None, "'y'", "without total_size", f"Pass total_size={N}")


@pytest.mark.parametrize("total_size", [N - 1, 4, 10 * N, [None]])
def test_minibatch_with_wrong_total_size_is_refused(total_size):
    refusal(minibatch_model(total_size), None, "'y'", "total_size", f"total_size={N}")


def test_total_size_on_another_axis_is_refused():
    with pm.Model() as model:
        y = pm.Minibatch(Y_ROWS, batch_size=4)
        pm.Normal("y", pm.Normal("mu"), 1, observed=y, total_size=(N, 2))
    refusal(model, None, "'y'", "axis other than the first", f"total_size={N}")


@pytest.mark.parametrize("total_size", [[N, ...], (N, None)])
def test_total_size_may_be_a_sequence(total_size):
    with pm.Model() as model:
        y = pm.Minibatch(Y_ROWS, batch_size=4)
        pm.Normal("y", pm.Normal("mu"), 1, observed=y, total_size=total_size)
    with pm.Model() as full_model:
        pm.Normal("y", pm.Normal("mu"), 1, observed=Y_ROWS)
    check_exact(model, full_model, None)


def test_wrong_total_size_on_full_data_is_refused():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu"), 1, observed=Y, total_size=5 * N)
    refusal(model, 4, "'y'", f"total_size={5 * N}", f"Pass total_size={N}")


def test_separate_minibatches_are_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X, batch_size=4), pm.Minibatch(Y, batch_size=4)
        pm.Normal("y", x @ pm.Normal("b", shape=D), 1, observed=y, total_size=N)
    refusal(model, None, "'y'", "2 calls of pm.Minibatch", "pm.Minibatch(X, y")


def test_minibatch_of_arrays_of_different_length_is_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X[:-1], Y, batch_size=4)
        pm.Normal("y", x @ pm.Normal("b", shape=D), 1, observed=y, total_size=N)
    refusal(model, None, "'y'", f"[{N - 1}, {N}] rows", "same number of rows")


def test_full_array_beside_pm_minibatch_is_refused():
    with pm.Model() as model:
        y = pm.Minibatch(Y, batch_size=N)
        pm.Normal("y", X @ pm.Normal("b", shape=D), 1, observed=y, total_size=N)
    refusal(model, None, "'y'", "can't be evaluated on some of its", "rows on the leading axis")


@pytest.mark.parametrize("batch_size", [N + 1, 0, -3])
def test_batch_size_outside_the_data_is_refused(batch_size):
    refusal(
        build(constants, whole, None), batch_size, f"batch_size={batch_size}", f"1 and the {N} rows"
    )


@pytest.mark.parametrize("batch_size", [2.5, 4.0, "10", True, np.True_, [4], {"y": None}])
def test_batch_size_that_is_no_count_is_refused(batch_size):
    refusal(build(constants, whole, None), batch_size, f"batch_size={batch_size!r}", "whole number")


@pytest.mark.parametrize("batch_size", [np.int32(4), {"y": np.int64(4)}])
def test_batch_size_may_be_any_integer(batch_size):
    model = build(constants, whole, None)
    gradient = MinibatchGradient(model, model.value_vars, batch_size, compile_kwargs=FAST)
    assert gradient.groups[0].batch_size == 4


@pytest.mark.parametrize(
    "batch_size, parts",
    [
        (4, ("batch_size=4", "different numbers of rows", "Name the groups")),
        ({"nobody": 4}, ("'nobody' names no group", "'y'", "'row'", "'x_other'", "7 rows")),
        ({"y": 4, "row": 5}, ("[4, 5] to the same rows", "Name them once")),
        ({"counts": 8}, ("batch_size={'counts': 8}", "between 1 and the 7 rows")),
        ({"counts": True}, ("batch_size={'counts': True}", "whole number")),
        ({"y": "4", "row": 4}, ("batch_size={'y': '4', 'row': 4}", "whole number")),
    ],
)
def test_batch_size_that_fits_no_group_is_refused(batch_size, parts):
    refusal(two_tables(), batch_size, *parts)
