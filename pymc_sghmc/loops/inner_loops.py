"""All inner steps of a step method: compiled where that can be, else made one by one in Python.

Knows the signature of ``update`` and what a target offers; knows no formula.
"""

import logging

import numpy as np

from pymc_sghmc.faults import NonFinite
from pymc_sghmc.loops.inner_loop import InnerLoop, InnerSteps, NotTraceable, Replay
from pymc_sghmc.loops.normals import MANY

__all__ = ["InnerLoops"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it


class InnerLoops:
    """Makes inner steps with an ``update`` rule, and keeps what it has compiled for them.

    Parameters
    ----------
    update : callable
    sampler : str
        Name of the sampler, for messages.
    reports : bool
        Whether each inner step is to report its log-density.
    """

    def __init__(self, update, sampler, reports):
        self.update = update
        self._sampler = sampler
        self._reports = reports
        self._loops = {}

    def __call__(self, state, n, rng, target, settings, reports) -> InnerSteps:
        """Make ``n`` inner steps with equal settings, or fewer.

        With ``reports`` the last of them is to report the log-density, which Python does where the
        compiled steps don't.
        """
        loop = self._find(state, target, settings)
        if loop is not None:
            n -= reports and not loop.reports
            if n:
                return loop(state, n, rng, target, settings)
        if state.position.size < MANY:
            return self._in_python(state, target, rng, settings)
        # NumPy's normals would take as long as all else
        replay = Replay(target, target.draw_minibatch(rng), (), rng)
        return self._in_python(state, replay, replay, settings)

    def again(self, done, target, settings) -> InnerSteps:
        """Make in Python, which says what is wrong, the step that a compiled loop couldn't make."""
        replay = Replay(target, *done.failed)
        return self._in_python(done.state, replay, replay, settings)

    def _in_python(self, state, target, rng, settings) -> InnerSteps:
        others = dict(settings)
        eta = others.pop("learning_rate")
        state, info = self.update(state, target, eta, rng, **others)
        kinetic = 0.0
        if len(state) > 1:
            kinetic = float(state.momentum.dot(state.momentum))
        return InnerSteps(state, 1, kinetic, logp=float(info["minibatch_logp"]))

    def _find(self, state, target, settings):
        """Return the compiled loop for these settings, or None where Python must take its place."""
        ndims = tuple([getattr(value, "ndim", 0) for value in settings.values()])
        if max(ndims) > 1:
            return None  # roots of matrices are NumPy's
        gradient = target.gradient
        kind = type(gradient).__name__, *gradient.data.is_noisy, target.coordinates.kind, ndims
        if kind not in self._loops:
            if not gradient.density.has_graph:
                return None  # in a worker that wasn't forked, after a change of gradient
            self._loops[kind] = self._compiled(state, target, settings)
        return self._loops[kind]

    def _compiled(self, state, target, settings):
        """Compile a loop, check it on this model, here, and say so if it isn't ``update``."""
        try:
            kwargs = target.gradient.density.compile_kwargs
            loop = InnerLoop(self.update, state, target, settings, kwargs, self._reports)
        except NotTraceable:
            return None
        place = target.chain.place
        sums = (target.virial, target.square_norm)
        try:
            right = self._is_update(loop, state, target, settings)
        except NonFinite:
            right = True  # nothing to compare; the step itself will say what is wrong
        target.chain.place = place
        target.virial, target.square_norm = sums
        if right:
            return loop
        _log.warning(
            f"{self._sampler}: the compiled inner step doesn't agree with the gradient of "
            "this model, so that steps are made one by one in Python. Results are right, but "
            "slower. Please report the model."
        )
        return None

    def _is_update(self, loop, state, target, settings) -> bool:
        """Whether a compiled step does what ``update`` does at this state.

        A check on the user's own model, before its chains depend on the graphs that were rewritten.
        None of a chain's random numbers are taken.
        """
        found, is_finite, made_with = loop.one_step(
            state, np.random.default_rng(0), target, settings
        )
        replay = Replay(target, *made_with)
        expected = self._in_python(state, replay, replay, settings).state
        if not is_finite:
            return False
        moved = [(a - b, b - c) for a, b, c in zip(found, expected, state, strict=True)]
        tolerance = np.finfo(state.position.dtype).eps ** 0.25
        return all(np.abs(error).max() <= tolerance * np.abs(way).max() for error, way in moved)
