"""Compiled minibatch gradients of a PyMC model's log-density, and their noise.

A gradient is a callable with two functions, ``draw_minibatch(rng) -> minibatch`` and
``gradient(position, minibatch) -> (logp, grad)``. The minibatch is an explicit token: the same
one can be evaluated at two positions. Positions are raveled unconstrained vectors of shape (d,).
Knows no momentum and no iteration.
"""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import compile, join_nonshared_inputs, rewrite_pregrad
from pytensor.gradient import NullTypeGradError
from pytensor.graph.replace import clone_replace

from pymc_sghmc.compat import ancestors
from pymc_sghmc.loops.backends import resident, shared_values
from pymc_sghmc.models.contract import minibatch_log_density
from pymc_sghmc.models.graphs import array_of, odd_values
from pymc_sghmc.models.jumps import conditional_unknowns

__all__ = ["MinibatchGradient", "NoisyGradient"]

N_MICROBATCHES = 10
CHUNK_BYTES = 2**24  # of data gathered at a time in a pass over all rows


class NoisyGradient:
    """What every gradient from minibatches can tell of its noise."""

    def draw_probe(self, rng) -> tuple:
        """Draw a minibatch that no step of a chain is made of."""
        return self.draw_minibatch(rng)

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
        minibatch = self.draw_probe(rng)
        d = position.size
        total = np.zeros((d, d) if full else d)
        for k, rows in enumerate(minibatch):
            if not self.is_noisy[k]:
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


class MinibatchGradient(NoisyGradient):
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
    data : dict of {str: array}, optional
        Arrays that take the place of what the model's ``pm.Data`` of these names hold.
    n_rows : int, optional
        Number of rows of the data if ``data`` holds some of them only.
    """

    replace = True  # a row may come up again before all others have
    place = None  # of a chain in its data, where rows aren't drawn independently

    def __init__(
        self,
        model,
        variables,
        batch_size=None,
        initial_point=None,
        compile_kwargs=None,
        data=None,
        n_rows=None,
    ) -> None:
        point = model.initial_point() if initial_point is None else initial_point
        data = data or {}
        lengths = {name: n_rows or len(array) for name, array in data.items()}
        rest, self.groups = minibatch_log_density(model, batch_size, point, lengths)
        sources = [source for group in self.groups for source in group.full_data]
        full = [data.get(source.name, source) for source in sources]
        # The arrays are inputs of the compiled function: it holds no data and sees new ones.
        arrays = [
            _input_like(source, held.dtype, f"data_{i}")
            for i, (source, held) in enumerate(zip(sources, full, strict=True))
        ]
        rows = [pt.lvector(f"rows_{i}") for i in range(len(self.groups))]
        batches = [
            (batch, idx) for g, idx in zip(self.groups, rows, strict=True) for batch in g.batches
        ]
        gathered = {
            batch: array[idx].astype(batch.dtype)
            for (batch, idx), array in zip(batches, arrays, strict=True)
        }
        # The prior and each row have weights: 1 and N/n, or others for parts of the whole.
        likelihoods = [group.log_likelihood for group in self.groups]
        prior_weight = pt.scalar("prior_weight")
        row_weights = [pt.vector(f"row_weights_{i}") for i in range(len(self.groups))]
        weighted = [(w * rows).sum() for w, rows in zip(row_weights, likelihoods, strict=True)]
        logp = pt.add(prior_weight * rest, *weighted)
        self._parts = (point, variables, rest, likelihoods, gathered)  # for `ControlVariates`
        # The unknowns that other steps sample
        given = [v for v in model.value_vars if v not in set(variables)]
        self.given_types = [(v.name, v.dtype) for v in given]
        needed = set(ancestors(likelihoods))
        self.needed_by_likelihood = [v.name for v in given if v in needed]
        self.likelihood_needs_others = bool(self.needed_by_likelihood)

        self.conditional = [v.name for v in conditional_unknowns(logp, variables)]
        logp = rewrite_pregrad(logp)
        try:
            grads = pt.grad(logp, variables, disconnected_inputs="ignore")
        except (NotImplementedError, NullTypeGradError) as error:
            raise ValueError(
                "The log-density has no gradient that PyTensor could take. Give the operation one, "
                "write it with PyTensor's own, or leave the unknowns to a step that needs none, such "
                f"as pm.Slice. (PyTensor says: {str(error).strip().splitlines()[0]})"
            ) from error
        grad = pt.concatenate([g.ravel() for g in grads])
        outputs = [logp, grad, *likelihoods]
        if gathered:
            outputs = clone_replace(outputs, gathered, rebuild_strict=False)
        (logp, grad, *likelihoods), position = join_nonshared_inputs(point, outputs, variables)
        grad = grad.astype(position.dtype)
        self.dtype = np.dtype(position.dtype)
        self.d = sum(np.size(point[variable.name]) for variable in variables)
        self.weights_dtype = np.dtype(prior_weight.dtype)
        self.sources = full
        others = [*rows, *arrays, *given]
        self.compile_kwargs = {"on_unused_input": "ignore", **(compile_kwargs or {})}
        self._graph = (position, prior_weight, row_weights, others, logp, grad, likelihoods)
        inputs = [position, prior_weight, *row_weights, *others]
        self.function, self._n_inputs = self._compiled(inputs, [logp, grad]), len(inputs)
        self.given = ()
        self.load_data()
        self.condition_on(point)

    def _compiled(self, inputs, outputs):
        function = compile(inputs, outputs, **self.compile_kwargs)
        function.trust_input = True
        return function

    @property
    def held(self) -> tuple:
        """Values, now, of the model's data containers that aren't cut into minibatches."""
        return shared_values(self.function, self._n_inputs)

    @property
    def has_graph(self) -> bool:
        """Whether more can be compiled: a pickled gradient comes without its graph."""
        return self._graph is not None

    def symbolic(self, position) -> tuple:
        """Return ∇ log p̃ at a symbolic position, and what it takes.

        Returns
        -------
        gradient : TensorVariable
        rows : list of TensorVariable
            The rows of a minibatch of each group that `draw_minibatches` draws.
        fixed : list of TensorVariable
            What `fixed_inputs` gives.
        """
        own, prior_weight, row_weights, others, _, grad, _ = self._graph
        [grad] = clone_replace([grad], {own: position}, rebuild_strict=False)
        rows, rest = others[: len(self.groups)], others[len(self.groups) :]
        all_rows = [row for row, noisy in zip(rows, self.is_noisy, strict=True) if not noisy]
        drawn = [row for row, noisy in zip(rows, self.is_noisy, strict=True) if noisy]
        return grad, drawn, [prior_weight, *row_weights, *all_rows, *rest]

    def fixed_inputs(self) -> tuple:
        """Return the values, now, of what doesn't change from one minibatch to the next."""
        all_rows = [rows for _, _, rows in self._draws if rows is not None]
        return (*self._weights, *all_rows, *self._inputs)

    def draw_minibatches(self, rng, k) -> tuple:
        """Draw the rows of ``k`` minibatches, shape (k, n), for each group that isn't used whole."""
        return tuple([rng.integers(N, size=(k, n)) for N, n, rows in self._draws if rows is None])

    def minibatch(self, drawn) -> tuple:
        """Return the minibatch with these rows of the groups that aren't used whole."""
        drawn = iter(drawn)
        return tuple([next(drawn) if rows is None else rows for _, _, rows in self._draws])

    def row_function(self, terms=None):
        """Compile what is known of each row: its log-likelihood, or ``terms`` that begin with it.

        Inputs: position, rows, data, other unknowns. Outputs: a matrix for each group of rows.
        """
        position, _, _, others, _, _, likelihoods = self._graph
        terms = [by_row[:, None] for by_row in likelihoods] if terms is None else terms
        return self._compiled([position, *others], terms)

    @property
    def is_noisy(self) -> list[bool]:
        """Whether a minibatch of each group is less than all of its rows."""
        return [rows is None for _, _, rows in self._draws]

    @property
    def n_at_hand(self) -> list[int]:
        """Number of rows of each group that can be picked at will."""
        return self.n_rows

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
        self._chunk_rows = self._rows_per_chunk()
        self._weights = self._uniform_weights([n for _, n, _ in self._draws])
        self._resident = tuple([resident(self.function, array) for array in self.arrays])
        self._inputs = (*self._resident, *self.given)

    def _rows_per_chunk(self) -> list[int]:
        arrays = iter(self.arrays)
        row_bytes = [
            sum(array.itemsize * array[:1].size for array in islice(arrays, len(group.batches)))
            for group in self.groups
        ]
        return [max(1000, CHUNK_BYTES // max(1, size)) for size in row_bytes]

    def _uniform_weights(self, sizes) -> tuple:
        """Weights of the prior and of rows drawn evenly: 1 and N/n."""
        scales = zip(self.n_rows, sizes, strict=True)
        rows = [np.full(n, n_rows / n, dtype=self.weights_dtype) for n_rows, n in scales]
        return (np.ones((), dtype=self.weights_dtype), *rows)

    def condition_on(self, point) -> None:
        """Hold the unknowns that other steps sample at their values in ``point``."""
        if self.given_types:
            # copies: in workers PyMC changes the arrays of a point in place
            self.set_given(
                tuple(np.array(point[name], dtype=dtype) for name, dtype in self.given_types)
            )

    def set_given(self, given) -> None:
        """Hold the unknowns that other steps sample at these values."""
        self.given = given
        self._inputs = (*self._resident, *given)

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
        weights = self._weights
        if any(w.size != rows.size for w, rows in zip(weights[1:], minibatch, strict=True)):
            weights = self._uniform_weights([rows.size for rows in minibatch])
        return self.function(position, *weights, *minibatch, *self._inputs)

    def prior(self, position):
        """Log-density and gradient of all but the likelihoods that are cut into minibatches."""
        return self._weighted(position)

    def likelihood(self, position, subset=None):
        """Log-likelihood and gradient of all rows, or of a subset scaled by N over its size.

        One pass over the data in chunks of bounded memory. ``subset`` is a minibatch.
        """
        logp, grad = 0.0, np.zeros(position.shape)
        for k, chunk, weight in self._chunks(subset):
            part = self._weighted(position, (k, chunk, weight))
            logp, grad = logp + float(part[0]), grad + part[1]
        return logp, grad

    def leverages(self, row_function, points) -> list:
        """Curvature of each row's log-likelihood between ``points``, for each group of rows.

        ``points`` are a middle and pairs of ends on either side of it; of each pair the second
        difference of the log-likelihood is taken, and of these the root mean square.
        """
        out = [np.zeros(n_rows, dtype=np.float32) for n_rows in self.n_rows]
        for k, chunk, _ in self._chunks(None):
            rows = self._others(k, chunk)
            middle, *ends = [row_function(x, *rows, *self._inputs)[k][:, 0] for x in points]
            differences = [a + b - 2 * middle for a, b in zip(ends[::2], ends[1::2], strict=True)]
            squares = np.mean(np.square(differences), axis=0)
            out[k][chunk] = np.nan_to_num(np.sqrt(squares), posinf=0.0)
        return out

    def tables(self, row_function, position) -> list:
        """Return what ``row_function`` says of each row but its log-likelihood, by group of rows."""
        out = [None] * len(self.groups)
        for k, chunk, _ in self._chunks(None):
            part = row_function(position, *self._others(k, chunk), *self._inputs)[k][:, 1:]
            if out[k] is None:
                out[k] = np.empty((self.n_rows[k], part.shape[1]), dtype=part.dtype)
            out[k][chunk] = part
        return out

    def _chunks(self, subset):
        for k, n_rows in enumerate(self.n_rows):
            rows = None if subset is None else subset[k]
            count = n_rows if rows is None else rows.size
            for start in range(0, count, self._chunk_rows[k]):
                stop = min(start + self._chunk_rows[k], count)
                yield (
                    k,
                    np.arange(start, stop) if rows is None else rows[start:stop],
                    n_rows / count,
                )

    def _others(self, k, chunk) -> list:
        """Rows of group k, and one row, which won't count, of each other."""
        return [chunk if i == k else np.zeros(1, dtype=np.int64) for i in range(len(self.groups))]

    def log_density(self, position, subset=None):
        """Log-density and gradient from all rows, or from a subset of them."""
        prior, likelihood = self.prior(position), self.likelihood(position, subset)
        return float(prior[0]) + likelihood[0], prior[1] + likelihood[1]

    def _weighted(self, position, chunk=None):
        """Log-likelihood and gradient of rows of one group, (group, rows, weight), or the prior."""
        k, rows, weight = (None, None, None) if chunk is None else chunk
        minibatch = self._others(k, rows)
        weights = [np.zeros(rows.size, dtype=self.weights_dtype) for rows in minibatch]
        if chunk is not None:
            weights[k][:] = weight
        prior_weight = np.asarray(chunk is None, dtype=self.weights_dtype)
        return self.function(position, prior_weight, *weights, *minibatch, *self._inputs)

    def odd_values(self, minibatch=None) -> str:
        """Say what the data of these rows, or of all, contain that no gradient comes of, if anything.

        ``pm.set_data`` may have put it there.
        """
        arrays = iter(self.arrays)
        everything = [slice(None)] * len(self.groups)
        return odd_values(
            next(arrays)[rows]
            for group, rows in zip(self.groups, minibatch or everything, strict=True)
            for _ in group.batches
        )

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
        bare = {
            "_parts": None,
            "sources": self.arrays,
            "groups": groups,
            "_resident": None,
            "_inputs": None,
        }
        return {**self.__dict__, **bare, "_graph": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.load_data()


def _input_like(source, dtype, name):
    kind = source.type
    return pt.tensor(name, dtype=str(dtype), shape=(None, *kind.shape[1:]))
