"""The inner steps of a draw in one compiled call, or as near to that as the backend allows.

A sampler's ``update`` is written in plain array operations. Here it is called once on symbolic
arrays, with a gradient and a generator that are symbolic, too, and what comes back is compiled: the
whole inner step, gradient included, is one function, and the rule stays written in one place.
Random numbers are drawn outside, in blocks, so that every backend sees the same stream. Knows
graphs and the signature of ``update``; knows no formula.
"""

from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import compile
from pytensor.graph.replace import clone_replace

from pymc_sghmc.compat import ancestors, is_row_selection
from pymc_sghmc.loops.backends import is_numba, loop_around
from pymc_sghmc.loops.normals import standard_normals

__all__ = ["InnerLoop", "InnerSteps", "Replay", "is_update"]

BLOCK_BYTES = 2**22  # of random numbers drawn at a time


class InnerSteps(NamedTuple):
    """What some inner steps came to."""

    state: tuple  # after the last of them
    n_steps: int  # made; fewer than were asked for where the next one's gradient isn't finite
    virial: float  # Σ −(θ − c)·∇ log p̃(θ)
    square_norm: float  # Σ |∇ log p̃(θ)|²
    kinetic: float  # Σ |v|², zero without momentum
    failed: tuple | None  # minibatch and normals of the step that isn't finite


class InnerLoop:
    """Inner steps of a sampler at fixed settings, without their log-densities.

    A gradient alone costs up to 40 % less than one with the log-density, which only the last step
    of a draw reports.

    Parameters
    ----------
    update : callable
        A sampler's ``update(state, gradient, learning_rate, rng, *, temperature, ...)``.
    state : NamedTuple
        Of arrays of shape (d,), the position first and then the momentum, if any.
    gradient : MinibatchGradient or ControlVariates
    factor : array of shape (d,) or (d, d), or None
        The preconditioner's, of which the number of axes counts.
    settings : dict
        Further settings of ``update``, numbers or arrays of shape (d,): again their axes count.
    compile_kwargs : dict
        Keyword arguments of ``pymc.pytensorf.compile``.
    """

    def __init__(self, update, state, gradient, factor, settings, compile_kwargs):
        self.gradient, self.state_type = gradient, type(state)
        dtype = self.dtype = gradient.dtype
        symbols = [pt.vector(name, dtype=dtype) for name in state._fields]
        normals, centre = pt.vector("normals", dtype=dtype), pt.vector("centre", dtype=dtype)
        values = {"learning_rate": 0.0, "temperature": 0.0, **settings}
        inputs = {name: _input(name, value, dtype) for name, value in values.items()}
        scale = None if factor is None else _input("factor", factor, dtype)
        traced = _SymbolicGradient(gradient, scale)
        others = {name: x for name, x in inputs.items() if name != "learning_rate"}
        eta, rng = inputs["learning_rate"], _SymbolicGenerator(normals)
        new, _ = update(type(state)(*symbols), traced, eta, rng, **others)
        sums = [
            ((centre - traced.position) * traced.gradient).sum(),
            (traced.gradient**2).sum(),
            (new[1] ** 2).sum() if len(new) > 1 else pt.zeros((), dtype=dtype),
        ]
        outputs = [*(part.astype(dtype) for part in new), pt.stack(sums).astype("float64")]
        self.names = tuple(inputs)
        fixed = [*inputs.values(), centre, *([] if scale is None else [scale]), *traced.fixed]
        batches = {}
        if is_numba(compile_kwargs.get("mode")):  # the loop fetches rows faster than the step
            batches = _row_selections(outputs, traced.rows, fixed, dtype)
            selected = {x: batch for batch, xs in batches.items() for x in xs}
            outputs = clone_replace(outputs, selected, rebuild_strict=False)
        self.gathers = [
            (fixed.index(array), traced.rows.index(row), batch.type.ndim, batch.dtype)
            for batch, (array, row) in ((b, xs[0].owner.inputs) for b, xs in batches.items())
        ]
        explicit = [*symbols, normals, *batches, *traced.rows, *fixed]
        kwargs = {"on_unused_input": "ignore", **compile_kwargs}
        self.function, self.n_inputs = compile(explicit, outputs, **kwargs), len(explicit)
        self.function.trust_input = True
        self.n_rows = len(traced.rows)
        self.__setstate__({})

    def __getstate__(self):
        return {**self.__dict__, "loop": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        counts = self.n_inputs, len(self.state_type._fields), self.n_rows
        self.loop = loop_around(self.function, *counts, self.gathers)

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.gradient = deepcopy(self.gradient, memo)  # it may know the place of a chain
        return copied

    def constants(self, settings, centre, factor) -> tuple:
        """Return the inputs of all steps that aren't the gradient's."""
        values = [np.asarray(settings[name], dtype=self.dtype) for name in self.names]
        scale = [] if factor is None else [factor]
        return (*values, centre.astype(self.dtype), *scale)

    def __call__(self, state, n, rng, *, settings, centre, factor) -> InnerSteps:
        """Make ``n`` inner steps, or those before the first that isn't finite."""
        fixed = self.constants(settings, centre, factor)
        d = state.position.size
        block = max(1, BLOCK_BYTES // (8 * (d + sum(self.gradient.noisy_batch_sizes))))
        done, sums = 0, np.zeros(3)
        while done < n:
            k = min(block, n - done)
            rows = self.gradient.draw_minibatches(rng, k)
            k = min([k, *map(len, rows)])  # a stream gives what it has at hand
            normals = standard_normals(rng, (k, d), self.dtype)
            inputs = (*fixed, *self.gradient.fixed_inputs())
            parts, made, *more = self.loop(tuple(state), normals, rows, inputs)
            state, done, sums = self.state_type(*parts), done + made, sums + more
            if made < k:
                failed = self.gradient.minibatch([r[made] for r in rows]), normals[made]
                return InnerSteps(state, done, *sums.tolist(), failed)
        return InnerSteps(state, done, *sums.tolist(), None)


class Replay:
    """A gradient and a generator that bring one inner step back: its minibatch and its normals."""

    def __init__(self, gradient, minibatch, normals):
        self._gradient, self._minibatch, self._normals = gradient, minibatch, normals

    def draw_minibatch(self, rng):
        """Return the minibatch."""
        return self._minibatch

    def standard_normal(self, shape, dtype):
        """Return the normals."""
        return self._normals

    def __call__(self, position, minibatch):
        """Log-density and gradient."""
        return self._gradient(position, minibatch)


def is_update(loop, update, state, target, *, settings, centre, factor) -> bool:
    """Whether a compiled step does what ``update`` does at this state.

    A check on the user's own model, before its chains depend on the graphs that were rewritten.
    Of ``target`` no chain's random numbers are taken.
    """
    rng, gradient, dtype = np.random.default_rng(0), loop.gradient, state.position.dtype
    rows = gradient.draw_minibatches(rng, 1)
    normals = standard_normals(rng, (1, state.position.size), dtype)
    inputs = (*loop.constants(settings, centre, factor), *gradient.fixed_inputs())
    found, made, *_ = loop.loop(tuple(state), normals, rows, inputs)
    minibatch, [normals] = gradient.minibatch([r[0] for r in rows]), normals
    replay, others = Replay(target, minibatch, normals), dict(settings)
    eta = others.pop("learning_rate")
    expected, _ = update(state, replay, eta, replay, **others)
    if made == 0:
        return False
    moved = [(a - b, b - c) for a, b, c in zip(found, expected, state, strict=True)]
    tolerance = np.finfo(dtype).eps ** 0.25
    return all(np.abs(error).max() <= tolerance * np.abs(way).max() for error, way in moved)


class _SymbolicGradient:
    """Stands for a gradient while ``update`` is called on symbolic arrays."""

    def __init__(self, gradient, factor):
        self._gradient, self._factor = gradient, factor

    def draw_minibatch(self, rng):
        return None  # the rows are inputs of the compiled step

    def __call__(self, position, minibatch):
        L = self._factor
        self.position = position if L is None else L * position if L.ndim == 1 else L @ position
        self.gradient, self.rows, self.fixed = self._gradient.symbolic(self.position)
        g = self.gradient
        return None, g if L is None else L * g if L.ndim == 1 else L.T @ g


class _SymbolicGenerator:
    """Stands for a generator: its normals are an input of the compiled step."""

    def __init__(self, normals):
        self._normals = normals

    def standard_normal(self, shape, dtype):
        return self._normals


def _row_selections(outputs, rows, fixed, dtype) -> dict:
    """Return an input to take the place of ``x[row]``, for each fixed x and row, and where it is.

    In a model of double precision single numbers become double as they are fetched, not again in
    every product.
    """
    found = {}
    for variable in dict.fromkeys(ancestors(outputs)):
        if is_row_selection(variable):
            array, row = variable.owner.inputs
            if array in fixed and row in rows:
                found.setdefault((array, row), []).append(variable)
    return {
        pt.tensor(dtype=_upcast(array, dtype), shape=(None, *array.type.shape[1:])): variables
        for (array, _), variables in found.items()
    }


def _upcast(array, dtype):
    return np.promote_types(array.dtype, dtype) if array.dtype == "float32" else array.dtype


def _input(name, value, dtype):
    return pt.tensor(name, shape=(None,) * np.ndim(value), dtype=dtype)
