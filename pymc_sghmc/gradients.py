"""Compiled minibatch gradients of a PyMC model's log-density, and their noise.

A gradient is a callable with two functions, ``draw_minibatch(rng) -> minibatch`` and
``gradient(position, minibatch) -> (logp, grad)``. The minibatch is an explicit token: the same
one can be evaluated at two positions. Positions are raveled unconstrained vectors of shape (d,).
Knows no momentum and no iteration.
"""

from dataclasses import replace

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import compile, join_nonshared_inputs, rewrite_pregrad
from pytensor.graph.replace import clone_replace
from scipy.linalg import solve_triangular

from pymc_sghmc.minibatch import minibatch_log_density
from pymc_sghmc.rows import array_of

__all__ = ["MinibatchGradient", "PreconditionedGradient", "preconditioner_factor"]

N_MICROBATCHES = 10


class MinibatchGradient:
    """Unbiased log-density and gradient from rows drawn with replacement (eq. 5 of Chen et al.).

    −∇Ũ(θ) = N/n Σ_batch ∇log p(x_i|θ) + ∇log p(θ); without minibatches, the exact gradient.
    With ``batch_size`` = N every row is used once and the gradient is exact, too.

    Parameters
    ----------
    model : pm.Model
    variables : list of TensorVariable
        Continuous value variables, in the order in which the position is raveled.
    batch_size : int or dict of {str: int}, optional
        See `minibatch_log_density`.
    initial_point : dict, optional
        Gives the shapes; default: the model's.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``mode``.
    """

    def __init__(
        self, model, variables, batch_size=None, initial_point=None, compile_kwargs=None
    ) -> None:
        point = model.initial_point() if initial_point is None else initial_point
        rest, self.groups = minibatch_log_density(model, batch_size, point)
        full = [source for group in self.groups for source in group.full_data]
        # The arrays are inputs of the compiled function: it holds no data and sees new ones.
        arrays = [_input_like(source, f"data_{i}") for i, source in enumerate(full)]
        rows = [pt.lvector(f"rows_{i}") for i in range(len(self.groups))]
        logp, gathered, k = rest, {}, 0
        for group, idx in zip(self.groups, rows, strict=True):
            for batch in group.batches:
                gathered[batch] = arrays[k][idx]
                k += 1
            total_size = arrays[k - 1].shape[0]
            logp = logp + group.log_likelihood(total_size)
        logp = rewrite_pregrad(logp)
        grads = pt.grad(logp, variables, disconnected_inputs="ignore")
        grad = pt.concatenate([g.ravel() for g in grads])
        if gathered:
            logp, grad = clone_replace([logp, grad], gathered, rebuild_strict=False)
        (logp, grad), position = join_nonshared_inputs(point, [logp, grad], variables)
        # The unknowns that other steps sample
        given = [v for v in model.value_vars if v not in set(variables)]
        self.given_types = [(v.name, v.dtype) for v in given]

        self.dtype = np.dtype(position.dtype)
        self.sources = full
        self.function = compile(
            [position, *rows, *arrays, *given],
            [logp, grad.astype(position.dtype)],
            **{"on_unused_input": "ignore", **(compile_kwargs or {})},
        )
        self.function.trust_input = True
        self.given = ()
        self.load_data()
        self.condition_on(point)

    @property
    def is_exact(self) -> bool:
        """Whether every minibatch is all of the data."""
        return not self.noisy_batch_sizes

    @property
    def noisy_batch_sizes(self) -> list[int]:
        """Sizes of the minibatches that aren't all of their rows; empty if the gradient is exact."""
        return [n for n_rows, n, _ in self._draws if n < n_rows]

    def load_data(self) -> None:
        """Take the arrays that the model's data containers hold now; no copy is made."""
        # PyMC masks NaN in its data containers: take the bare array
        self.arrays = tuple(
            np.ma.getdata(source if isinstance(source, np.ndarray) else array_of(source))
            for source in self.sources
        )
        lengths = iter(map(len, self.arrays))
        self.n_rows = []
        for group in self.groups:
            [n_rows, *others] = {next(lengths) for _ in group.batches}
            if others:
                raise ValueError(
                    f"The data of {', '.join(group.terms)} have {sorted([n_rows, *others])} rows: "
                    "after pm.set_data all arrays of a likelihood need the same number."
                )
            if group.batch_size > n_rows:
                raise ValueError(
                    f"batch_size={group.batch_size}: more than the {n_rows} rows that "
                    f"{', '.join(group.terms)} has now."
                )
            self.n_rows.append(n_rows)
        self._draws = [
            (n_rows, group.batch_size, np.arange(n_rows) if group.batch_size == n_rows else None)
            for n_rows, group in zip(self.n_rows, self.groups, strict=True)
        ]
        self._inputs = (*self.arrays, *self.given)

    def condition_on(self, point) -> None:
        """Hold the unknowns that other steps sample at their values in ``point``."""
        if self.given_types:
            self.given = tuple(
                np.asarray(point[name], dtype=dtype) for name, dtype in self.given_types
            )
            self._inputs = (*self.arrays, *self.given)

    def draw_minibatch(self, rng) -> tuple:
        """Draw the rows of one minibatch, an array of row indices for each group of rows."""
        return tuple(
            [
                rng.integers(n_rows, size=n) if rows is None else rows
                for n_rows, n, rows in self._draws
            ]
        )

    def __call__(self, position, minibatch):
        """Log-density and gradient at ``position``, both estimated from ``minibatch``."""
        return self.function(position, *minibatch, *self._inputs)

    def has_missing_values(self, minibatch) -> bool:
        """Whether the data of these rows contain NaN, as ``pm.set_data`` may have put there."""
        arrays = iter(self.arrays)
        return any(
            np.isnan(next(arrays)[rows]).any()
            for group, rows in zip(self.groups, minibatch, strict=True)
            for _ in group.batches
        )

    def noise_covariance(self, position, rng, full: bool = False) -> np.ndarray:
        """Estimate V(θ) = Cov[∇Ũ] from one fresh minibatch cut into micro-batches.

        The covariance of the gradients of micro-batches of b rows, times b/n: unbiased, with the
        factor N²/n of rows drawn with replacement; the prior adds nothing to it. This is the
        empirical Fisher information of Ahn et al. (2012) with micro-batches for rows.

        Parameters
        ----------
        position : array of shape (d,)
        rng : numpy.random.Generator
        full : bool, default False
            All of the matrix, not its diagonal alone.

        Returns
        -------
        array of shape (d,) or (d, d)
        """
        minibatch = self.draw_minibatch(rng)
        d = position.size
        total = np.zeros((d, d) if full else d)
        for k, rows in enumerate(minibatch):
            if self._draws[k][2] is not None:  # all rows: no noise
                continue
            n = rows.size
            b = max(1, n // N_MICROBATCHES)
            micro = [
                self(position, (*minibatch[:k], rows[i : i + b], *minibatch[k + 1 :]))[1]
                for i in range(0, n - b + 1, b)
            ]
            deviations = np.stack(micro) - np.mean(micro, axis=0)  # (micro-batches, d)
            scale = b / n / (len(micro) - 1)
            total += scale * (
                deviations.T @ deviations if full else np.square(deviations).sum(axis=0)
            )
        return total

    def __deepcopy__(self, memo):
        # Copies of a step share the data, the model's containers and the compiled function.
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self):
        # Workers get the data as they are now, not the model's containers and graphs.
        self.load_data()
        groups = [
            replace(
                group,
                sources=[],
                batches=[None] * len(group.batches),
                terms=dict.fromkeys(group.terms),
            )
            for group in self.groups
        ]
        return {**self.__dict__, "sources": self.arrays, "groups": groups}

    def __setstate__(self, state):
        self.__dict__.update(state)


class PreconditionedGradient:
    """A gradient in the coordinates φ with θ = Lφ, in which the preconditioner LLᵀ = M⁻¹ is 1.

    The update rules keep a scalar η: η of theirs in φ is ηM⁻¹ in θ, for noise and friction too.

    Parameters
    ----------
    gradient : callable
        In θ.
    factor : array of shape (d,) or (d, d)
        L, see `preconditioner_factor`.
    """

    def __init__(self, gradient, factor):
        self.gradient = gradient
        self.draw_minibatch = gradient.draw_minibatch
        self.factor = factor
        if factor.ndim == 1:
            self.to_theta, self._pull_back = factor.__mul__, factor.__mul__
        else:
            self.to_theta, self._pull_back = factor.dot, np.ascontiguousarray(factor.T).dot

    def from_theta(self, theta):
        """φ = L⁻¹θ."""
        if self.factor.ndim == 1:
            return theta / self.factor
        return solve_triangular(self.factor, theta, lower=True)

    def __call__(self, position, minibatch):
        """Log-density and its gradient with respect to φ."""
        logp, grad = self.gradient(self.to_theta(position), minibatch)
        return logp, self._pull_back(grad)


def preconditioner_factor(preconditioner, d: int) -> np.ndarray:
    """Check M⁻¹ and return L with LLᵀ = M⁻¹: square roots of d entries, or Cholesky's factor.

    Raises
    ------
    ValueError
        If M⁻¹ has another shape than (d,) or (d, d) or isn't positive definite.
    """
    if np.asarray(preconditioner).dtype.kind not in "fiu":
        raise ValueError(
            f"preconditioner={preconditioner!r}: pass an array of shape ({d},) or ({d}, {d})."
        )
    matrix = np.asarray(preconditioner, dtype=float)
    if matrix.shape not in ((d,), (d, d)):
        raise ValueError(
            f"preconditioner has shape {matrix.shape}, but the step samples {d} unconstrained "
            f"unknowns: pass an array of shape ({d},) or ({d}, {d})."
        )
    if matrix.ndim == 1:
        if not (np.isfinite(matrix).all() and (matrix > 0).all()):
            raise ValueError("preconditioner: all entries must be finite and above zero.")
        return np.sqrt(matrix)
    try:
        if not np.allclose(matrix, matrix.T):
            raise np.linalg.LinAlgError
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        raise ValueError(
            "preconditioner: the matrix must be symmetric positive definite."
        ) from None


def _input_like(source, name):
    kind = source.type
    return pt.tensor(name, dtype=kind.dtype, shape=(None, *kind.shape[1:]))
