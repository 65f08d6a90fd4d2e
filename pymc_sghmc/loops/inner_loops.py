"""All inner steps of a step method: compiled if possible, otherwise made one by one in Python.

Normals and rows are drawn outside the compiled step, in blocks, so that every backend sees the same
random numbers.
"""

import logging

from typing import Any, NamedTuple

import numpy as np

from pymc.pytensorf import compile

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.loops.backends import CompiledStep, fastest_mode, is_numba, loop_around
from pymc_sghmc.loops.normals import MANY, standard_normals
from pymc_sghmc.loops.numba_operations import with_quick_operations
from pymc_sghmc.loops.numpy_mode import without_traces
from pymc_sghmc.loops.tracing import NotTraceable, coordinate_arrays, traced_step
from pymc_sghmc.protocols import Array, Generator, Minibatches, Target, Update

__all__ = ["InnerLoop", "InnerLoops", "InnerSteps", "RandomInputs", "Replay"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own logger, which shows it

BLOCK_BYTES = 2**22  # of random numbers drawn at a time


class RandomInputs(NamedTuple):
    """The random numbers of one inner step."""

    minibatch: Any
    normals: Array  # one vector after another, (n_normals · d,)


class InnerSteps(NamedTuple):
    """Result of one or more inner steps."""

    state: Any  # after the last of them
    n_steps: int  # fewer than were asked for if the next one is not finite
    kinetic: float  # Σ |v|²; zero without momentum
    failed: RandomInputs | None = None  # of the step that is not finite
    logp: float = np.nan  # log-density at the last step's minibatch; NaN if it was not computed


class OneStep(NamedTuple):
    """Result of a single compiled step."""

    state: Any
    is_finite: bool
    random_inputs: RandomInputs


class _Block(NamedTuple):
    """Minibatches of the next steps."""

    n_steps: int
    minibatches: Minibatches
    gradient_inputs: tuple[Any, ...]  # inputs of the gradient that do not change between them


class InnerLoop:
    """Inner steps of a sampler in one compiled call, with settings of given shapes.

    A gradient alone costs up to 40 % less than one with the log-density, which only the last step
    of a draw reports. Therefore steps compute the log-density only if it comes with the gradient at
    next to no cost, or if ``with_logp`` asks for it.

    Parameters
    ----------
    update : callable
        A sampler's ``update(state, gradient, learning_rate, rng, *, temperature, ...)``.
    state : NamedTuple of arrays
        The position, (d,), first, and then the momentum, if any. Their number of axes is taken.
    target : Target
        Its gradient is traced. The number of axes of its coordinates' arrays is taken.
    settings : dict
        Settings of ``update``: numbers, or arrays of shape (d,). Their number of axes is taken.
    compile_kwargs : dict
        Keyword arguments of ``pymc.pytensorf.compile``.
    with_logp : bool, default False
        Whether each step must compute the log-density, because it is the last step of a draw.

    Attributes
    ----------
    has_logp : bool
        Whether steps compute the log-density.

    Raises
    ------
    NotTraceable
        If ``update`` asks for more than one gradient.
    """

    def __init__(
        self,
        update: Update,
        state: Any,
        target: Target,
        settings: dict[str, Any],
        compile_kwargs: dict[str, Any],
        with_logp: bool = False,
    ) -> None:
        self.state_type = type(state)
        self.dtype = state.position.dtype
        self.setting_names = tuple(settings)
        traced = traced_step(update, state, target, settings, with_logp)
        mode = fastest_mode(compile_kwargs.get("mode"))
        if is_numba(mode):
            traced = traced.with_fetched_rows(self.dtype)
            mode = with_quick_operations(mode)
        self.n_normals = traced.n_normals
        self.has_logp = traced.has_logp
        options = {"on_unused_input": "ignore", **compile_kwargs, "mode": mode}
        function = compile(traced.inputs, without_traces(traced.outputs), **options)
        function.trust_input = True
        self.step = CompiledStep(
            function=function,
            n_inputs=len(traced.inputs),
            n_state=len(traced.state),
            n_groups=len(traced.rows),
            fetched=traced.fetched,
        )
        self.loop = loop_around(self.step)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "loop": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.loop = loop_around(self.step)

    def __deepcopy__(self, memo: dict[int, Any]) -> "InnerLoop":
        return self  # it never changes

    def __call__(
        self,
        state: Any,
        n: int,
        rng: np.random.Generator,
        target: Target,
        settings: dict[str, Any],
    ) -> InnerSteps:
        """Make ``n`` inner steps, or those before the first that is not finite."""
        fixed = self._fixed_inputs(settings, target)
        n_normals = state.position.size * self.n_normals
        numbers_of_step = n_normals + sum(target.gradient.data.noisy_batch_sizes)
        longest = max(1, BLOCK_BYTES // (8 * numbers_of_step))
        n_steps = 0
        virial = square_norm = kinetic = 0.0
        logp = np.nan
        failed = None
        while n_steps < n and failed is None:
            block = _drawn_block(target, rng, min(longest, n - n_steps))
            normals = standard_normals(rng, (block.n_steps, n_normals), self.dtype)
            result = self.loop(
                _arrays(state), normals, block.minibatches.drawn, (*fixed, *block.gradient_inputs)
            )
            state = self.state_type(*result.state)
            n_steps += result.n_steps
            virial += float(result.virial)
            square_norm += float(result.square_norm)
            kinetic += float(result.kinetic)
            if self.has_logp and result.n_steps:
                logp = float(result.logp)
            if result.n_steps < block.n_steps:
                minibatch = block.minibatches.one(result.n_steps)
                failed = RandomInputs(minibatch, normals[result.n_steps])
        target.add(virial, square_norm)
        return InnerSteps(state, n_steps, kinetic, failed, logp)

    def one_step(
        self, state: Any, rng: np.random.Generator, target: Target, settings: dict[str, Any]
    ) -> OneStep:
        """Make one step, without adding it to the target's sums."""
        fixed = self._fixed_inputs(settings, target)
        block = _drawn_block(target, rng, 1)
        normals = standard_normals(rng, (1, state.position.size * self.n_normals), self.dtype)
        result = self.loop(
            _arrays(state), normals, block.minibatches.drawn, (*fixed, *block.gradient_inputs)
        )
        random_inputs = RandomInputs(block.minibatches.one(0), normals[0])
        return OneStep(self.state_type(*result.state), result.n_steps == 1, random_inputs)

    def _fixed_inputs(self, settings: dict[str, Any], target: Target) -> tuple[Array, ...]:
        """Return the fixed inputs before those of the gradient, as `traced_step` orders them."""
        values = [np.asarray(settings[name], dtype=self.dtype) for name in self.setting_names]
        reference_point = target.centre.astype(self.dtype)
        return (*values, reference_point, *coordinate_arrays(target).values())


class Replay:
    """A target and a generator that repeat one inner step, with its minibatch and its normals.

    Without ``normals`` they are drawn once from ``rng``.
    """

    def __init__(
        self,
        target: Target,
        minibatch: Any,
        normals: Array | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._target = target
        self._minibatch = minibatch
        self._normals = normals
        self._rng = rng

    def draw_minibatch(self, rng: Any) -> Any:
        """Return the minibatch."""
        return self._minibatch

    def standard_normal(self, shape: tuple[int], dtype: Any) -> Array:
        """Return the next normals."""
        [d] = shape
        if self._normals is None or len(self._normals) == 0:
            assert self._rng is not None  # a step takes as many normals as it was compiled for
            [self._normals] = standard_normals(self._rng, (1, d), dtype)
        normals = self._normals[:d]
        self._normals = self._normals[d:]
        return normals

    def __call__(self, position: Array, minibatch: Any) -> tuple[Any, Any]:
        """Log-density and gradient."""
        return self._target(position, minibatch)


class InnerLoops:
    """Makes the inner steps of one step method, and keeps the loops compiled for them.

    There is one loop for each kind of gradient, of coordinates, and of shapes of the settings.

    Parameters
    ----------
    update : callable
        The sampler's ``update``.
    sampler : str
        Name of the sampler, for messages.
    with_logp : bool
        Whether each inner step must compute its log-density: true if a draw is one inner step.
    """

    def __init__(self, update: Update, sampler: str, with_logp: bool) -> None:
        self.update = update
        self._sampler = sampler
        self._with_logp = with_logp
        self._loops: dict[tuple[Any, ...], InnerLoop | None] = {}

    def __call__(
        self,
        state: Any,
        n: int,
        rng: np.random.Generator,
        target: Target,
        settings: dict[str, Any],
        with_logp: bool,
    ) -> InnerSteps:
        """Make ``n`` inner steps with equal settings, or fewer.

        If ``with_logp``, the last of these must report its log-density. If compiled steps do not
        compute it, the last step is left to the next call, which makes it in Python.
        """
        loop = self.find(state, target, settings)
        if loop is not None:
            n -= with_logp and not loop.has_logp
            if n:
                return loop(state, n, rng, target, settings)
        if state.position.size < MANY:
            return self._in_python(state, target, rng, settings)
        # many normals would take NumPy as long as all the rest
        replay = Replay(target, target.draw_minibatch(rng), rng=rng)
        return self._in_python(state, replay, replay, settings)

    def again(self, done: InnerSteps, target: Target, settings: dict[str, Any]) -> InnerSteps:
        """Repeat in Python the step at which a compiled loop ended, to raise the error it has."""
        assert done.failed is not None
        replay = Replay(target, done.failed.minibatch, done.failed.normals)
        return self._in_python(done.state, replay, replay, settings)

    def find(self, state: Any, target: Target, settings: dict[str, Any]) -> InnerLoop | None:
        """Return the compiled loop for these settings, or None if steps must be made in Python."""
        ndims = tuple([getattr(value, "ndim", 0) for value in settings.values()])
        if max(ndims) > 1:
            return None  # an update takes roots of matrices by NumPy
        gradient = target.gradient
        kind = type(gradient).__name__, *gradient.data.is_noisy, target.coordinates.kind, ndims
        if kind not in self._loops:
            if not gradient.density.has_graph:
                return None  # in a worker that was not forked, after a change of gradient
            self._loops[kind] = self._compiled(state, target, settings)
        return self._loops[kind]

    def _in_python(
        self,
        state: Any,
        target: Target | Replay,
        rng: Generator,
        settings: dict[str, Any],
    ) -> InnerSteps:
        others = dict(settings)
        learning_rate = others.pop("learning_rate")
        state, statistics = self.update(state, target, learning_rate, rng, **others)
        kinetic = 0.0
        if len(state) > 1:
            kinetic = float(state.momentum.dot(state.momentum))
        return InnerSteps(state, 1, kinetic, logp=float(statistics["minibatch_logp"]))

    def _compiled(self, state: Any, target: Target, settings: dict[str, Any]) -> InnerLoop | None:
        """Compile a loop and check one step of it on this model; log a warning if it is wrong."""
        try:
            loop = InnerLoop(
                self.update,
                state,
                target,
                settings,
                target.gradient.density.compile_kwargs,
                self._with_logp,
            )
        except NotTraceable:
            return None
        cursor = target.chain.place
        virial = target.virial
        square_norm = target.square_norm
        try:
            is_right = self._is_update(loop, state, target, settings)
        except NonFinite:
            is_right = True  # nothing to compare; the step itself will report the reason
        target.chain.place = cursor
        target.virial = virial
        target.square_norm = square_norm
        if is_right:
            return loop
        _log.warning(
            f"{self._sampler}: the compiled inner step doesn't agree with the gradient of "
            "this model. Please report the model to the developers. Until that is mended, inner "
            "steps are made one by one in Python: results are right, but slower."
        )
        return None

    def _is_update(
        self, loop: InnerLoop, state: Any, target: Target, settings: dict[str, Any]
    ) -> bool:
        """Whether a compiled step does what ``update`` does at this state.

        This is checked on the user's own model, before its chains depend on graphs that were
        rewritten. The random numbers of chains are not used.
        """
        step = loop.one_step(state, np.random.default_rng(0), target, settings)
        if not step.is_finite:
            return False
        replay = Replay(target, step.random_inputs.minibatch, step.random_inputs.normals)
        expected = self._in_python(state, replay, replay, settings).state
        tolerance = np.finfo(state.position.dtype).eps ** 0.25
        for part, expected_part, old_part in zip(step.state, expected, state, strict=True):
            error = np.abs(part - expected_part).max()
            change = np.abs(expected_part - old_part).max()
            if not error <= tolerance * change:
                return False
        return True


def _drawn_block(target: Target, rng: np.random.Generator, k: int) -> _Block:
    minibatches = target.draw_minibatches(rng, k)
    k = min([k, *map(len, minibatches.drawn)])  # a stream gives the rows that it has in memory
    return _Block(k, minibatches, target.gradient.fixed_inputs(minibatches.arrays))


def _arrays(state: Any) -> tuple[Array, ...]:
    """Compiled steps take arrays, and NumPy turns arrays without axes into numbers."""
    return tuple([np.asarray(part) for part in state])
