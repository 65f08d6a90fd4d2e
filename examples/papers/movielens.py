"""MovieLens-1M and the matrix factorisation of both papers (eq. 29 of the SGHMC supplement)."""

from typing import NamedTuple

import numpy as np
import pymc as pm

N_FOLDS = 5
NAMES = ("U", "V", "a", "b")


class Ratings(NamedTuple):
    """Ratings, users and movies as numbers from 0."""

    user: np.ndarray
    movie: np.ndarray
    rating: np.ndarray

    def where(self, chosen):
        """Return some of the ratings."""
        return Ratings(*(column[chosen] for column in self))


def read_ratings(path, seed=0):
    """Return all ratings and the fold of each, from GroupLens's ratings.dat or ml1m.npz."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            user, movie, rating, fold = (file[key] for key in ("user", "item", "rating", "fold5"))
    else:
        text = path.read_text(encoding="latin-1").replace("::", " ")
        user, movie, rating = np.array(text.split(), dtype=int).reshape(-1, 4).T[:3]
        fold = np.random.default_rng(seed).integers(N_FOLDS, size=len(user))
    user, movie = (np.unique(column, return_inverse=True)[1] for column in (user, movie))
    return Ratings(user.astype("int32"), movie.astype("int32"), rating.astype(float)), fold


def factorisation(train, n_users, n_movies, rank, precisions=None):
    """Build the model of eq. 29: Gaussian factors and biases, Gamma(1, 1) precisions.

    That of the ratings is one of them. The mean rating is subtracted. ``precisions``, a dict, are fixed instead.
    """
    shapes = {"U": (n_users, rank), "V": (n_movies, rank), "a": n_users, "b": n_movies}

    def precision(name):
        return pm.Gamma(name, 1.0, 1.0) if precisions is None else precisions[name]

    with pm.Model() as model:
        user = pm.Data("user", train.user)
        movie = pm.Data("movie", train.movie)
        rating = pm.Data("rating", train.rating - train.rating.mean())
        U, V, a, b = (
            pm.Normal(name, 0.0, tau=precision(f"lam_{name}"), shape=shape)
            for name, shape in shapes.items()
        )
        mean = (U[user] * V[movie]).sum(-1) + a[user] + b[movie]
        pm.Normal("y", mean, tau=precision("tau"), observed=rating)
    return model


def predictor(ratings, mean_rating):
    """Return a function of a point: ratings expected of these users for these movies."""
    user, movie, _ = ratings

    def predict(point):
        U, V, a, b = (point[name] for name in NAMES)
        product = np.einsum("ij,ij->i", U[user], V[movie])
        return mean_rating + product + a[user] + b[movie]

    return predict


def rmse(prediction, ratings):
    """Root mean square error of predictions, kept within 1 to 5."""
    return float(np.sqrt(np.mean((np.clip(prediction, 1, 5) - ratings.rating) ** 2)))


def mean_of_each_movie(train, test):
    """Predict the mean rating of the movie, or of all where it has none."""
    n = max(train.movie.max(), test.movie.max()) + 1
    sums, counts = (np.bincount(train.movie, w, n) for w in (train.rating, None))
    return np.where(counts > 0, sums / np.maximum(counts, 1), train.rating.mean())[test.movie]


def start(model, rng, scale=0.1):
    """Small random factors: at zero the product has no gradient."""
    point = model.initial_point()
    return {name: rng.normal(0, scale, np.shape(point[name])) for name in NAMES}
