"""Grouped models of many kinds, each in two forms, and moments by long runs of NUTS beside them."""

from pathlib import Path

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from data_folder import data_folder

__all__ = ["MODELS", "REFERENCES", "UNITS"]

REFERENCES = Path(__file__).with_name("grouped_references.npz")


def effects(name, raw, tau, shape, form):
    """An effect u, and in the non-centred form u = τz."""
    if form == "centred":
        return pm.Normal(name, 0, tau, shape=shape)
    return pm.Deterministic(name, pm.Normal(raw, 0, 1, shape=shape) * tau)


def logistic(form, groups, rows, tau):
    """Random intercepts."""
    rng = np.random.default_rng(0)
    group, u = np.repeat(np.arange(groups), rows), rng.normal(0, tau, groups)
    x = rng.normal(size=(groups * rows, 3))
    p = 1 / (1 + np.exp(-(x @ [0.5, -0.3, 0.8] + 0.3 + u[group])))
    y = (rng.random(groups * rows) < p).astype(int)
    with pm.Model() as model:
        tau, b, a = pm.HalfNormal("tau", 1), pm.Normal("b", 0, 1, shape=3), pm.Normal("a", 0, 1)
        u = effects("u", "z", tau, groups, form)
        pm.Bernoulli("y", logit_p=a + x @ b + u[group], observed=y)
    return model


def nested(form, dispersion=None):
    """Counts at 300 sites in 30 regions."""
    rng = np.random.default_rng(1)
    regions, sites, rows = 30, 300, 20
    region, site = (
        np.repeat(np.arange(regions), sites // regions),
        np.repeat(np.arange(sites), rows),
    )
    r = rng.normal(0, 0.5, regions)
    s = r[region] + rng.normal(0, 0.4, sites)
    x = rng.normal(size=sites * rows)
    mu = np.exp(0.2 + 0.3 * x + s[site])
    y = rng.poisson(
        mu if dispersion is None else mu * rng.gamma(dispersion, 1 / dispersion, mu.size)
    )
    with pm.Model() as model:
        tau_r, tau_s = pm.HalfNormal("tau_r", 1), pm.HalfNormal("tau_s", 1)
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 1)
        if form == "centred":
            s = pm.Normal("s", pm.Normal("r", 0, tau_r, shape=regions)[region], tau_s, shape=sites)
        else:
            zr, zs = pm.Normal("zr", 0, 1, shape=regions), pm.Normal("zs", 0, 1, shape=sites)
            s = (zr * tau_r)[region] + zs * tau_s
        mu = pm.math.exp(a + b * x + s[site])
        if dispersion is None:
            pm.Poisson("y", mu, observed=y)
        else:
            pm.NegativeBinomial("y", mu=mu, alpha=pm.Exponential("alpha", 0.5), observed=y)
    return model


def movielens(form, ratings, ordered=False):
    """Users crossed with films."""
    with np.load(data_folder() / "movielens" / "ml100k.npz") as data:
        rows = np.random.default_rng(0).permutation(100_000)[:ratings]
        ids = [np.unique(data[key][rows], return_inverse=True)[1] for key in ("user", "item")]
        y = data["rating"][rows]
    with pm.Model() as model:
        mu = 0.0
        for i, k in zip(ids, "ui", strict=True):
            tau = pm.HalfNormal(f"tau_{k}", 1)
            mu = mu + effects(k, f"z{k}", tau, int(i.max() + 1), form)[i]
        if ordered:
            between = pm.distributions.transforms.ordered
            cuts = pm.Normal("c", 0, 3, shape=4, transform=between, initval=[-2.0, -1.0, 0.0, 1.5])
            pm.OrderedLogistic("y", eta=mu, cutpoints=cuts, observed=y.astype(int) - 1)
        else:
            a, sigma = pm.Normal("a", 3.5, 1), pm.HalfNormal("sigma", 2)
            pm.Normal("y", a + mu, sigma, observed=y.astype(float))
    return model


def slopes(form):
    """Correlated intercepts and slopes of 100 groups, errors of Student's t."""
    rng = np.random.default_rng(2)
    groups, rows = 100, 100
    group, x = np.repeat(np.arange(groups), rows), rng.normal(size=groups * rows)
    u = rng.normal(size=(groups, 2)) @ np.linalg.cholesky([[0.5, 0.15], [0.15, 0.3]]).T
    y = 1 + 0.5 * x + u[group, 0] + u[group, 1] * x + 0.8 * rng.standard_t(4, size=x.size)
    with pm.Model() as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0))
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 1)
        if form == "centred":
            u = pm.MvNormal("u", np.zeros(2), chol=chol, shape=(groups, 2))
        else:
            u = pm.Deterministic("u", pm.Normal("z", 0, 1, shape=(groups, 2)) @ chol.T)
        nu, sigma = pm.Gamma("nu", 2, 0.1), pm.HalfNormal("sigma", 1)
        mu = a + b * x + u[group, 0] + u[group, 1] * x
        pm.StudentT("y", nu=nu, mu=mu, sigma=sigma, observed=y)
    return model


def dozen(form):
    """A factor of a dozen groups beside one of a thousand."""
    rng = np.random.default_rng(8)
    n = 40_000
    g, h = rng.integers(0, 1000, n), rng.integers(0, 12, n)
    y = 1 + rng.normal(0, 0.5, 1000)[g] + rng.normal(0, 0.8, 12)[h] + rng.normal(size=n)
    with pm.Model() as model:
        a, sigma = pm.Normal("a", 0, 3), pm.HalfNormal("sigma", 2)
        u = effects("u", "zu", pm.HalfNormal("tau_u", 1), 1000, form)
        v = effects("v", "zv", pm.HalfNormal("tau_v", 1), 12, form)
        pm.Normal("y", a + u[g] + v[h], sigma, observed=y)
    return model


def homes(form):
    """A small model like that of radon: 85 counties of one to some forty homes, with a predictor each."""
    rng = np.random.default_rng(1)
    counties = 85
    sizes = rng.geometric(0.1, counties)
    county = np.repeat(np.arange(counties), sizes)
    u, floor = rng.normal(0, 0.3, counties), rng.integers(0, 2, county.size)
    uranium = rng.normal(size=counties)
    y = 1.4 - 0.7 * floor + (0.35 * uranium + u)[county] + rng.normal(0, 0.75, county.size)
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, 5), pm.Normal("b", 0, 5, shape=2)
        tau, sigma = pm.HalfNormal("tau", 1), pm.HalfNormal("sigma", 1)
        mean = a + b[1] * uranium
        if form == "centred":
            u = pm.Normal("u", mean, tau, shape=counties)
        else:
            u = pm.Deterministic("u", mean + tau * pm.Normal("z", 0, 1, shape=counties))
        pm.Normal("y", u[county] + b[0] * floor, sigma, observed=y)
    return model


def items(form):
    """Item response: 400 persons, 20 items with difficulty and discrimination."""
    rng = np.random.default_rng(7)
    persons, n = 400, 20
    person, item = (v.ravel() for v in np.meshgrid(range(persons), range(n), indexing="ij"))
    ability, slope = rng.normal(size=persons), rng.lognormal(0, 0.3, n)
    p = 1 / (1 + np.exp(-slope[item] * (ability[person] - rng.normal(size=n)[item])))
    y = (rng.random(p.size) < p).astype(int)
    with pm.Model() as model:
        ability = pm.Normal("ability", 0, 1, shape=persons)
        slope = pm.LogNormal("slope", 0, 0.5, shape=n)
        hard = effects("hard", "zb", pm.HalfNormal("tau", 2), n, form)
        pm.Bernoulli("y", logit_p=slope[item] * (ability[person] - hard[item]), observed=y)
    return model


def process(form):
    """A Gaussian process by 30 basis functions."""
    rng = np.random.default_rng(0)
    x = rng.permutation(np.sort(rng.uniform(0, 10, 20_000)))
    y = np.sin(x) + 0.5 * np.cos(3 * x) + rng.normal(0, 0.5, x.size)
    x = x[:, None] - x.mean()
    with pm.Model() as model:
        ell, eta = pm.InverseGamma("ell", 5, 5), pm.HalfNormal("eta", 1)
        sigma = pm.HalfNormal("sigma", 1)
        gp = pm.gp.HSGP(m=[30], c=1.5, cov_func=eta**2 * pm.gp.cov.Matern52(1, ls=ell))
        basis, root = gp.prior_linearized(x)
        b = pm.Normal("b", 0, root) if form == "centred" else root * pm.Normal("zb", shape=30)
        pm.Normal("y", basis @ b, sigma, observed=y)
    return model


def horseshoe(form):
    """Fifty coefficients, five of which aren't zero: the regularised horseshoe."""
    rng = np.random.default_rng(9)
    n, d = 5000, 50
    x, beta = rng.normal(size=(n, d)), np.zeros(d)
    beta[:5] = [1.0, -1.0, 0.5, 0.3, 0.2]
    y = x @ beta + rng.normal(size=n)
    with pm.Model() as model:
        sigma = pm.HalfNormal("sigma", 1)
        tau = pm.HalfStudentT("tau", nu=2, sigma=5 / (d - 5) / np.sqrt(n))
        lam, c2 = pm.HalfStudentT("lam", nu=5, sigma=1, shape=d), pm.InverseGamma("c2", 1, 1)
        scale = tau * lam * pt.sqrt(c2 / (c2 + tau**2 * lam**2))
        pm.Normal("y", x @ effects("beta", "z", scale, d, form), sigma, observed=y)
    return model


MODELS = {
    "logistic 500 × 40": lambda form: logistic(form, 500, 40, 0.7),
    "logistic 200 × 50": lambda form: logistic(form, 200, 50, 0.7),
    "logistic 200 × 20": lambda form: logistic(form, 200, 20, 0.7),
    "logistic 200 × 5": lambda form: logistic(form, 200, 5, 0.7),
    "logistic 200 × 2": lambda form: logistic(form, 200, 2, 0.8),
    "logistic 12 × 40": lambda form: logistic(form, 12, 40, 0.7),
    "logistic 12 × 4,000": lambda form: logistic(form, 12, 4000, 0.05),
    "logistic 2,000 × 20": lambda form: logistic(form, 2000, 20, 0.7),
    "logistic 2,000 × 10": lambda form: logistic(form, 2000, 10, 0.7),
    "Poisson, 300 in 30": nested,
    "negative binomial, 300 in 30": lambda form: nested(form, 2.0),
    "slopes, Student t": slopes,
    "12 beside 1,000": dozen,
    "85 counties": homes,
    "item response": items,
    "HSGP": process,
    "horseshoe": horseshoe,
    "MovieLens, 20,000": lambda form: movielens(form, 20_000),
    "MovieLens, 100,000": lambda form: movielens(form, 100_000),
    "MovieLens, 20,000, ordered": lambda form: movielens(form, 20_000, ordered=True),
    "MovieLens, 100,000, ordered": lambda form: movielens(form, 100_000, ordered=True),
}

# effects of the non-centred form that can be integrated out, group by group
UNITS = {name: "z" for name in MODELS if name.startswith(("logistic", "slopes", "85"))} | {
    "Poisson, 300 in 30": "zs",
    "negative binomial, 300 in 30": "zs",
    "12 beside 1,000": "zu",
    "item response": "ability",
}
