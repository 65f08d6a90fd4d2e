"""Minibatches of data that never are in memory as a whole: a loader's blocks, read ahead.

The rows of a loader, pass after pass, are one endless sequence. Windows of it, each of a whole number
of minibatches, are held in memory and shuffled with the seed of the chain; while one is in use the
next is read in the background. So every row comes up once in each pass, and the place of a chain is
its seed and how many minibatches it has drawn. Knows gradients and loaders, no samplers.
"""

import threading
import warnings

from collections.abc import Mapping

import numpy as np

from scipy.special import fdtri

from pymc_sghmc.gradients.gradients import MinibatchGradient
from pymc_sghmc.models.graphs import odd_values
from pymc_sghmc.rows.epochs import EpochGradient
from pymc_sghmc.rows.sources import Source, given_arrays

__all__ = ["StreamedGradient", "minibatch_gradient"]

PILOT_ROWS = 50_000  # at hand for what needs some rows only, at most ...
PILOT_BYTES = 2**27
WINDOW_BYTES = 2**25  # of a window, about; two are in memory
WINDOW_BLOCKS, WINDOW_MINIBATCHES = 4, 10  # in a window, at least
PROBES, PROBE_ROWS = 100, 20  # sums of rows that tell how much rows differ
UNEVEN = 3.0  # times as much noise over windows as rows in random order would have


def minibatch_gradient(
    model, variables, batch_size, initial_point, compile_kwargs, data=None, replace=True
) -> MinibatchGradient:
    """Make the gradient from the model's own rows, or from arrays or a loader given as ``data``."""
    if not isinstance(replace, bool | np.bool_):
        raise ValueError(f"replace={replace!r}: must be True or False.")
    if data is not None and batch_size is None:
        raise ValueError("data= holds rows for minibatches: pass a batch_size, too.")
    arguments = (model, variables, batch_size, initial_point, compile_kwargs)
    if data is not None and not isinstance(data, Mapping):
        return StreamedGradient(*arguments, loader=data)
    kind = MinibatchGradient if replace else EpochGradient
    return kind(*arguments, data=None if data is None else given_arrays(model, data))


class StreamedGradient(EpochGradient):
    """An `EpochGradient` whose rows come in blocks from a loader.

    A minibatch holds rows of the window in memory and can be evaluated until the next is drawn.
    What needs some rows only gets them from a pilot, the first rows that came: probes of the noise,
    curvature, the first climb to the mode. Full passes read all blocks.

    Parameters
    ----------
    model, variables, batch_size, initial_point, compile_kwargs
        See `MinibatchGradient`.
    loader : iterable
        See `pymc_sghmc.loaders`.
    """

    def __init__(self, model, variables, batch_size, initial_point, compile_kwargs, loader):
        self.source = source = Source(loader, model)
        row_bytes = sum(row.nbytes for row in source.first.values())
        n_pilot = min(PILOT_ROWS, max(1000, PILOT_BYTES // row_bytes), source.rows_per_pass)
        self._place = self._window = self._ahead = None
        self._order_is_checked = False
        rows = Rows(source, list(source.first), 0)
        pilot = dict(zip(source.first, rows.read(0, n_pilot), strict=True))
        rows.close()
        super().__init__(
            model, variables, batch_size, initial_point, compile_kwargs, pilot, source.n_rows
        )
        [group, *others] = self.groups
        if others:
            raise ValueError(
                "data=: the model has several groups of rows with different numbers of them. A "
                "loader gives the rows of one; the others must be used whole: name the one in "
                "batch_size={name: n}."
            )
        n = group.batch_size
        if n > source.rows_per_pass // 2:
            raise ValueError(
                f"batch_size={n}: a loader of {source.n_rows} rows needs minibatches of at most "
                "half of them. Lower batch_size, or leave it out and put the data into the model."
            )
        self.names = [variable.name for variable in group.sources]
        wanted = getattr(loader, "buffer_rows", None) or max(
            WINDOW_BYTES // row_bytes, WINDOW_BLOCKS * source.block_rows, WINDOW_MINIBATCHES * n
        )
        self.minibatches_per_window = max(1, min(wanted, source.rows_per_pass) // n)

    # --- What the base class takes from arrays --------------------------------------------------

    def load_data(self) -> None:
        """Take the pilot's arrays; the loader is asked at the first minibatch."""
        self.arrays = tuple(self.sources)
        [group] = self.groups[:1]
        self.n_rows = [self.source.n_rows]
        self._draws = [(self.source.n_rows, group.batch_size, None)]
        self._chunk_rows = self._rows_per_chunk()
        self._weights = self._uniform_weights([group.batch_size])
        self._use(self.arrays)

    def _use(self, arrays):
        """Let rows be those of these arrays."""
        self._in_use, self._inputs = arrays, (*arrays, *self.given)

    def set_given(self, given) -> None:
        """Hold the unknowns that other steps sample at these values."""
        self.given = given
        self._use(self._in_use)

    @property
    def n_at_hand(self) -> list[int]:
        """Number of rows that can be picked at will: the pilot's."""
        return [len(self.arrays[0])]

    def draw_probe(self, rng) -> tuple:
        """Draw rows of the pilot, with replacement."""
        self._use(self.arrays)
        return (rng.integers(len(self.arrays[0]), size=self.groups[0].batch_size),)

    def odd_values(self, minibatch=None) -> str:
        """Say what these rows of the window, or all, contain that no gradient comes of, if anything."""
        rows = minibatch[0] if minibatch else slice(None)
        return odd_values(array[rows] for array in self._in_use)

    def leverages(self, row_function, points) -> list:
        """Not for streams: a row has no place where a number could be kept for it."""
        raise NotImplementedError("A stream has no leverages of rows: draw them uniformly.")

    def _weighted(self, position, chunk=None, arrays=None):
        in_use = self._in_use
        self._use(self.arrays if arrays is None else arrays)
        try:
            return super()._weighted(position, chunk)
        finally:
            self._use(in_use)

    # --- Windows of the stream ------------------------------------------------------------------

    @property
    def place(self):
        """Seed of the chain's windows, and minibatches drawn; None before the first."""
        return self._place

    @place.setter
    def place(self, place):
        if place is None or self._place is None or place[0] != self._place[0]:
            self._forget()
        self._place = place

    def draw_minibatches(self, rng, k) -> tuple:
        """Draw the next minibatches, shape (k, n), or fewer: those that are left in the window."""
        seed, t = self._place or (int(rng.integers(2**63)), 0)
        number, i = divmod(t, self.minibatches_per_window)
        if self._window is None or self._window[0] != (seed, number):
            self._open(seed, number)
        _, arrays, order = self._window
        rows = order[i : i + k]
        self._use(arrays)
        self._place = (seed, t + len(rows))
        return (rows,)

    def _open(self, seed, number):
        """Take a window into use and have the next one read."""
        count = self.minibatches_per_window * self.groups[0].batch_size
        if self._ahead is None or self._ahead.what != (seed, number):
            self._forget()
            rows = Rows(self.source, self.names, seed)
            self._ahead = _Ahead((seed, number), rows, number * count, count)
        arrays, rows = self._ahead.result(), self._ahead.rows
        order = np.random.default_rng([seed, number]).permutation(count)
        self._window = (seed, number), arrays, order.reshape(self.minibatches_per_window, -1)
        self._ahead = _Ahead((seed, number + 1), rows, (number + 1) * count, count)

    def _forget(self):
        """Let go of the window; wait for the thread to end."""
        if self._ahead is not None:
            self._ahead.close()
        self._window = self._ahead = None
        self._use(self.arrays)

    # --- Full passes ----------------------------------------------------------------------------

    def likelihood(self, position, subset=None):
        """Log-likelihood and gradient of all rows, in one pass, or of a subset of the pilot's."""
        if subset is not None:
            return super().likelihood(position, subset)
        logp, grads, sizes = 0.0, [], []
        for arrays in self._pass():
            grad = np.zeros(position.shape)
            for start in range(0, len(arrays[0]), self._chunk_rows[0]):
                rows = np.arange(start, min(start + self._chunk_rows[0], len(arrays[0])))
                part = self._weighted(position, (0, rows, 1.0), arrays)
                logp, grad = logp + float(part[0]), grad + part[1]
            grads.append(grad)
            sizes.append(len(arrays[0]))
        if not self._order_is_checked:
            self._order_is_checked = True
            self._check_order(position, np.array(grads), np.array(sizes))
        scale = self.source.n_rows / self.source.rows_per_pass
        return scale * logp, scale * np.sum(grads, axis=0)

    def _pass(self):
        """Yield the windows of one pass, each read while the one before is in use."""
        rows, total = Rows(self.source, self.names, 0), self.source.rows_per_pass
        size = self.minibatches_per_window * self.groups[0].batch_size
        ahead = _Ahead(0, rows, 0, min(size, total))
        try:
            for start in range(size, total + size, size):
                arrays = ahead.result()
                if start < total:
                    ahead = _Ahead(start, rows, start, min(size, total - start))
                yield arrays
            rows.finish()
        finally:
            ahead.close()

    def _check_order(self, position, grads, sizes):
        """Warn where windows differ more than rows in random order would let them."""
        if len(sizes) < 2 or not np.isfinite(grads).all():
            return
        n, rng = min(PROBE_ROWS, self.n_at_hand[0]), np.random.default_rng(0)
        with np.errstate(all="ignore"):
            probes = [
                self._weighted(position, (0, rng.integers(self.n_at_hand[0], size=n), 1.0))[1]
                for _ in range(PROBES)
            ]
            row_variance = np.var(probes, axis=0, ddof=1) / n
            mean = grads.sum(axis=0) / sizes.sum()
            deviations = grads - sizes[:, None] * mean
            between = (np.square(deviations) / sizes[:, None]).sum(axis=0) / (len(sizes) - 1)
            ratio = np.nan_to_num(between / row_variance, posinf=0.0).max()
        limit = fdtri(len(sizes) - 1, PROBES - 1, 1 - 1e-6 / position.size)
        if ratio > max(UNEVEN, limit):
            warnings.warn(
                f"data=: windows of {sizes[0]} successive rows differ as {ratio:.3g} times as many "
                "draws would not: the rows aren't in random order, so that noise lasts over many "
                "steps and variances come out too large. Write the data in random order, or raise "
                "the loader's buffer_rows, best to many times the length of runs of similar rows.",
                UserWarning,
                stacklevel=2,
            )

    # --- Copies and pickles: without window and thread ------------------------------------------

    def __deepcopy__(self, memo):
        copied = super().__deepcopy__(memo)
        copied._window = copied._ahead = None
        return copied

    def __getstate__(self):
        in_use = self._in_use
        try:
            return {**super().__getstate__(), "_window": None, "_ahead": None}
        finally:
            self._use(in_use)


class Rows:
    """The endless sequence of rows of a loader's passes, read from the front."""

    def __init__(self, source, names, seed):
        self.source, self.names, self.seed = source, names, seed
        self._at, self._blocks, self._rest, self._pass = None, None, None, 0

    def read(self, start, count) -> list:
        """Return copies of so many rows from ``start`` on, an array for each name."""
        if start != self._at:
            self._go_to(start)
        out = [
            np.empty((count, *row.shape[1:]), dtype=row.dtype)
            for row in map(self.source.first.get, self.names)
        ]
        filled = 0
        while filled < count:
            arrays = self._next(count - filled)
            n = len(arrays[0])
            for whole, part in zip(out, arrays, strict=True):
                whole[filled : filled + n] = part
            filled += n
        self._at = start + count
        return out

    def finish(self):
        """Read on to the end of the pass, where its length shows."""
        for _ in self._blocks:
            pass

    def close(self):
        """End the pass."""
        if self._blocks is not None:
            self._blocks.close()
        self._at = self._blocks = self._rest = None

    def _go_to(self, start):
        self.close()
        number, skipped = divmod(start, self.source.rows_per_pass)
        self._begin(number)
        while skipped > 0:
            skipped -= len(self._next(skipped)[0])

    def _begin(self, number):
        self._pass = number
        self._blocks = self.source.blocks(np.random.default_rng([self.seed, number, 1]))

    def _next(self, most):
        """Return the next rows, from one block."""
        while self._rest is None:
            block = next(self._blocks, None)
            if block is None:
                self._begin(self._pass + 1)
            elif len(block[self.names[0]]) > 0:
                self._rest = [block[name] for name in self.names]
        arrays = [array[:most] for array in self._rest]
        self._rest = [array[most:] for array in self._rest]
        if len(self._rest[0]) == 0:
            self._rest = None
        return arrays


class _Ahead:
    """Rows that a thread of their own is reading. The thread ends with them."""

    def __init__(self, what, rows, start, count):
        self.what, self.rows = what, rows
        self._arrays = self._error = None
        self._thread = threading.Thread(target=self._read, args=(start, count), daemon=True)
        self._thread.start()

    def _read(self, start, count):
        try:
            self._arrays = self.rows.read(start, count)
        except BaseException as error:  # it belongs to the chain
            self._error = error

    def result(self) -> list:
        """Wait for the rows."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._arrays

    def close(self):
        """Wait for the end of the thread and end the pass."""
        self._thread.join()
        self.rows.close()
