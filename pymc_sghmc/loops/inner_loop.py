"""The inner steps of a draw in one compiled call, or as near to that as the backend allows.

A sampler's ``update`` is written in plain array operations. Here it is called once on symbolic
arrays, with a gradient and a generator that are symbolic, too, and what comes back is compiled: the
whole inner step, gradient included, is one function, and the rule stays written in one place.
Random numbers are drawn outside, in blocks, so that every backend sees the same stream. Knows
graphs and the signature of ``update``; knows no formula.
"""

from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import compile
from pytensor.graph.replace import clone_replace

from pymc_sghmc.compat import ancestors, is_row_selection
from pymc_sghmc.loops.backends import is_numba, loop_around
from pymc_sghmc.loops.normals import standard_normals

__all__ = ["InnerLoop", "InnerSteps", "NotTraceable", "Replay"]

BLOCK_BYTES = 2**22  # of random numbers drawn at a time


class NotTraceable(TypeError):
    """An update rule that can't become one compiled step."""


class InnerSteps(NamedTuple):
    """What some inner steps came to."""

    state: tuple  # after the last of them
    n_steps: int  # made; fewer than were asked for where the next one's gradient isn't finite
    kinetic: float  # Σ |v|², zero without momentum
    failed: tuple | None = None  # minibatch and normals of the step that isn't finite
    logp: float = np.nan  # of the last one's minibatch, where it is known


class InnerLoop:
    """Inner steps of a sampler at fixed settings, without their log-densities as a rule.

    A gradient alone costs up to 40 % less than one with the log-density, which only the last step
    of a draw reports. Where the gradient gives it all the same, ``reports`` is true.

    Parameters
    ----------
    update : callable
        A sampler's ``update(state, gradient, learning_rate, rng, *, temperature, ...)``.
    state : NamedTuple
        Of arrays, the position (d,) first and then the momentum, if any: their axes count.
    target : Target
        Its gradient is traced, and the kind of its coordinates counts.
    settings : dict
        Settings of ``update``, numbers or arrays of shape (d,): again their axes count.
    compile_kwargs : dict
        Keyword arguments of ``pymc.pytensorf.compile``.
    reports : bool, default False
        Whether they are asked for, since each step is a draw's last.

    Raises
    ------
    NotTraceable
        If ``update`` takes more than one gradient.
    """

    def __init__(self, update, state, target, settings, compile_kwargs, reports=False):
        self.state_type = type(state)
        dtype = state.position.dtype
        self.dtype = dtype
        symbols = [_input(*field, dtype) for field in zip(state._fields, state, strict=True)]
        centre = pt.vector("centre", dtype=dtype)
        inputs = {name: _input(name, value, dtype) for name, value in settings.items()}
        metric = target.coordinates
        scales = {name: _input(name, array, dtype) for name, array in metric.arrays.items()}
        on_graph = metric.on_graph(scales)
        traced = _SymbolicGradient(target.gradient.symbolic, on_graph, reports)
        rng = _SymbolicGenerator()
        others = {name: x for name, x in inputs.items() if name != "learning_rate"}
        new, _ = update(type(state)(*symbols), traced, inputs["learning_rate"], rng, **others)
        sums = [
            ((centre - traced.position) * traced.gradient).sum(),
            (traced.gradient**2).sum(),
            (new[1] ** 2).sum() if len(new) > 1 else pt.zeros((), dtype=dtype),
            pt.zeros((), dtype=dtype) if traced.logp is None else traced.logp,
        ]
        self.reports = traced.logp is not None
        self.names = tuple(inputs)
        outputs = [*(part.astype(dtype) for part in new), pt.stack(sums).astype("float64")]
        self.n_normals = len(rng.drawn)
        (normals, outputs) = rng.joined(outputs, symbols[0])
        fixed = [*inputs.values(), centre, *scales.values(), *traced.fixed]
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
        self.function = compile(explicit, outputs, **kwargs)
        self.n_inputs = len(explicit)
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
        return self  # nothing of it changes

    def __call__(self, state, n, rng, target, settings) -> InnerSteps:
        """Make ``n`` inner steps, or those before the first that isn't finite."""
        fixed = self._constants(settings, target)
        size = state.position.size * self.n_normals
        rows = sum(target.gradient.data.noisy_batch_sizes)
        block = max(1, BLOCK_BYTES // (8 * (size + rows)))
        done = 0
        sums = (0.0, 0.0, 0.0)
        logp = np.nan
        failed = None
        while done < n and failed is None:
            k, minibatches, inputs = self._block(target, rng, min(block, n - done))
            normals = standard_normals(rng, (k, size), self.dtype)
            arguments = _arrays(state), normals, minibatches.drawn, (*fixed, *inputs)
            parts, made, *more, last = self.loop(*arguments)
            logp = float(last) if self.reports and made else logp
            state = self.state_type(*parts)
            done = done + made
            sums = [float(a + b) for a, b in zip(sums, more)]
            if made < k:
                failed = minibatches.one(made), normals[made]
        target.add(*sums[:2])
        return InnerSteps(state, done, sums[2], failed, logp)

    def one_step(self, state, rng, target, settings) -> tuple:
        """Make one step; return the new state, whether it is finite, and what it was made with."""
        _, minibatches, inputs = self._block(target, rng, 1)
        inputs = *self._constants(settings, target), *inputs
        normals = standard_normals(rng, (1, state.position.size * self.n_normals), self.dtype)
        new, made, *_ = self.loop(_arrays(state), normals, minibatches.drawn, inputs)
        return new, made == 1, (minibatches.one(0), normals[0])

    def _block(self, target, rng, k):
        minibatches = target.draw_minibatches(rng, k)
        k = min([k, *map(len, minibatches.drawn)])  # a stream gives what it has at hand
        return k, minibatches, target.gradient.fixed_inputs(minibatches.arrays)

    def _constants(self, settings, target) -> tuple:
        """Return the inputs of all steps that aren't the gradient's."""
        values = [np.asarray(settings[name], dtype=self.dtype) for name in self.names]
        scales = target.coordinates.arrays.values()
        return (*values, target.centre.astype(self.dtype), *scales)


class Replay:
    """A target and a generator that bring one inner step back: its minibatch and its normals.

    Normals beyond those given come from ``rng``.
    """

    def __init__(self, target, minibatch, normals, rng=None):
        self._target = target
        self._minibatch = minibatch
        self._normals = normals
        self._rng = rng

    def draw_minibatch(self, rng):
        """Return the minibatch."""
        return self._minibatch

    def standard_normal(self, shape, dtype):
        """Return the next normals."""
        [d] = shape
        if len(self._normals) == 0:
            [self._normals] = standard_normals(self._rng, (1, d), dtype)
        normals = self._normals[:d]
        self._normals = self._normals[d:]
        return normals

    def __call__(self, position, minibatch):
        """Log-density and gradient."""
        return self._target(position, minibatch)


class _SymbolicGradient:
    """Stands for a target while ``update`` is called on symbolic arrays."""

    def __init__(self, symbolic, coordinates, reports):
        self._symbolic = symbolic
        self._coordinates = coordinates
        self._reports = reports
        self.position = None

    def draw_minibatch(self, rng):
        return None  # the rows are inputs of the compiled step

    def __call__(self, position, minibatch):
        if self.position is not None:
            raise NotTraceable("update takes more than one gradient")
        theta = self.position = self._coordinates.to_theta(position)
        self.logp, self.gradient, self.rows, self.fixed = self._symbolic(theta, self._reports)
        return None, self._coordinates.pull_back(self.gradient)


class _SymbolicGenerator:
    """Stands for a generator: its normals are an input of the compiled step."""

    def __init__(self):
        self.drawn = []

    def standard_normal(self, shape, dtype):
        self.drawn.append(pt.vector("normals", dtype=dtype))
        return self.drawn[-1]

    def joined(self, outputs, position):
        """Return all normals of a step as one vector, and the outputs with its parts."""
        if len(self.drawn) == 1:
            return self.drawn[0], outputs
        normals = pt.vector("normals", dtype=position.dtype)
        d = position.shape[0]
        parts = {z: normals[i * d : (i + 1) * d] for i, z in enumerate(self.drawn)}
        return normals, clone_replace(outputs, parts, rebuild_strict=False)


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


def _arrays(state) -> tuple:
    """NumPy makes numbers of arrays without axes; compiled steps take arrays."""
    return tuple(map(np.asarray, state))


def _input(name, value, dtype):
    return pt.TensorType(dtype, (None,) * np.ndim(value))(name)
