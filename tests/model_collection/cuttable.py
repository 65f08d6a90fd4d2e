"""Models of every sort that can be cut into minibatches, in both ways, and their data."""

import warnings

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc.model.transform.optimization import freeze_dims_and_data

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


# --- Each builds inside a model from ``rows``, either of the two above, and ``total``,
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


def hsgp_linearized():
    # As PyMC's own examples write it: a constant basis, which PyMC computes in part only.
    with pm.Model() as model:
        cov = pm.HalfNormal("eta") ** 2 * pm.gp.cov.Matern52(1, ls=pm.Gamma("ls", 2, 1))
        gp = pm.gp.HSGP(m=[4], c=2.0, cov_func=cov)
        phi, sqrt_psd = gp.prior_linearized(X[:, :1])
        f = pm.Deterministic("f", phi @ (pm.Normal("beta", size=gp.n_basis_vectors) * sqrt_psd))
        pm.Normal("y", f, 0.5, observed=Y)
    return model


def hsgp_prior():
    with pm.Model() as model:
        gp = pm.gp.HSGP(m=[3, 2], c=2.0, cov_func=pm.gp.cov.ExpQuad(2, ls=pm.Gamma("ls", 2, 1)))
        pm.Bernoulli("y", logit_p=gp.prior("f", X=X[:, :2]), observed=BINARY)
    return model


def hsgp_periodic():
    with pm.Model() as model:
        cov = pm.gp.cov.Periodic(1, period=1.0, ls=pm.Gamma("ls", 2, 1))
        gp = pm.gp.HSGPPeriodic(m=4, scale=pm.HalfNormal("scale"), cov_func=cov)
        pm.Normal("y", gp.prior("f", X=X[:, :1]), 0.5, observed=Y)
    return model


def basis_of_constants():
    # Operations that PyMC leaves in the graph: they repeat an array.
    with pm.Model() as model:
        x, z, group = (pt.as_tensor(a) for a in (X[:, 0], X[:, 1], GROUP))
        hinges = pt.maximum(pt.broadcast_to(x, (3, N)).T - pt.as_tensor([-0.5, 0.0, 0.5]), 0.0)
        hot = pt.eq(pt.broadcast_to(group[:, None], (N, G)), pt.arange(G))
        mu = hinges @ pm.Normal("b", shape=3) + hot @ pm.Normal("a", shape=G)
        mu += pt.exp(pm.Normal("c")) * pt.log(x**2 + 1) * z
        pm.Normal("y", mu, 1, observed=Y)
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
    hsgp_linearized,
    hsgp_prior,
    hsgp_periodic,
    basis_of_constants,
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
