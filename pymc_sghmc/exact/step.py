"""The adapter between PyMC's step protocol and samplers with full gradients and a Metropolis test.

It turns ``init`` and ``update`` of a sampler file into a step method. It has the compiled
log-density that NUTS would use, PyMC's dual averaging, its statistics, its divergences, and saved
states. It contains no formula of a sampler.
"""

import math
import time

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, ClassVar, Protocol

import numpy as np

from numpy.linalg import LinAlgError
from pymc.exceptions import SamplingError
from pymc.model import Model, modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.arraystep import GradientSharedStep
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.step_methods.step_sizes import DualAverageAdaptation, StepSizeState
from pymc.util import get_random_generator
from rich.progress import TextColumn
from rich.table import Column

from pymc_sghmc.checks import continuous_variables, generator_of, is_number, starting_point
from pymc_sghmc.compat import ChainSetup
from pymc_sghmc.exact.leapfrog import Density
from pymc_sghmc.interrupts import DelayedInterrupt
from pymc_sghmc.protocols import Array
from pymc_sghmc.pymc_hooks import raveled_function

__all__ = ["HamiltonianStep"]


@dataclass_state
class HamiltonianState(StepMethodState):
    """What a chain needs to continue exactly where it was."""

    settings: dict[str, Any] = field(metadata={"frozen": True})  # as the user gave them
    n_draws: int
    tune: bool
    step_adapt: StepSizeState
    state: Any
    curvature: Any
    iter_count: int
    divergences: int


class SamplerState(Protocol):
    """What the state of a sampler has, whatever else it has."""

    @property
    def position(self) -> Array:
        """θ, (d,)."""

    @property
    def gradient(self) -> Array:
        """∇log p(θ), (d,)."""

    @property
    def logp(self) -> float:
        """Log p(θ)."""


class HamiltonianStep(ChainSetup, GradientSharedStep):
    """A step method made of a sampler's ``init`` and ``update``.

    Subclasses have a signature, its checks and its documentation. They define

    - ``init(position, density) -> state``,
    - ``begin()``, which forgets what the last chain has learnt, as ``curvature``, and
    - ``draw(state, step_size) -> (state, info)``, where ``info`` has statistics, and optionally
      under ``"message"`` a warning for the user.

    Parameters
    ----------
    vars, model, rng, initial_point, compile_kwargs, blocked
        As documented by the samplers.
    step_size : "auto" or float
        ε; "auto" is PyMC's dual averaging to ``target_accept``.
    target_accept : float
        Mean acceptance probability that dual averaging aims at.
    """

    init: Callable[[Array, Density], SamplerState]
    begin: Callable[[], None]
    draw: Callable[[Any, float], tuple[SamplerState, dict[str, Any]]]
    curvature: Any

    default_blocked = True
    stats_dtypes_shapes: ClassVar[dict[str, Any]] = {
        "step_size": (np.float64, []),
        "step_size_bar": (np.float64, []),
        "n_steps": (np.int64, []),
        "path_length": (np.float64, []),
        "accept": (np.float64, []),
        "accepted": (np.float64, []),  # as Metropolis has it, and both may be in one model
        "diverging": (bool, []),
        "divergences": (int, []),  # as NUTS has it, and both may be in one model
        "energy": (np.float64, []),
        "energy_error": (np.float64, []),
        "model_logp": (np.float64, []),
        "process_time_diff": (np.float64, []),
        "perf_counter_diff": (np.float64, []),
        "perf_counter_start": (np.float64, []),
        "curvature_pairs_kept": (np.int64, []),
        "curvature_pairs_skipped": (np.int64, []),
        "largest_eigval": (np.float64, []),
        "smallest_eigval": (np.float64, []),
        "condition": (np.float64, []),
        "warning": (SamplerWarning, None),
    }
    _state_class = HamiltonianState

    def __init__(
        self,
        vars: Any,
        *,
        step_size: Any,
        target_accept: Any,
        model: Model | None,
        rng: np.random.Generator | int | None,
        initial_point: dict[str, Any] | None,
        compile_kwargs: dict[str, Any] | None,
        blocked: bool,
    ) -> None:
        name = type(self).__name__
        model = modelcontext(model)
        self.is_auto = _is_auto(step_size)
        _check_target_accept(target_accept)
        generator_of("rng", rng, copy=False)
        point = starting_point(model, initial_point)
        super().__init__(
            continuous_variables(vars, model, name),
            model=model,
            blocked=blocked,
            rng=rng,
            initial_point=point,
            compile_kwargs=compile_kwargs,
        )
        self.function = raveled_function(self._logp_dlogp_func)
        self.dtype = np.dtype(self._logp_dlogp_func.dtype)
        self.d = sum(np.size(point[var_name]) for var_name in self.var_names)
        self.target_accept = float(target_accept)
        self.settings = {"step_size": step_size, "target_accept": target_accept}
        # PyMC's first guess: a quarter of d^(-1/4)
        self.first_step_size = 0.25 / self.d**0.25 if self.is_auto else float(step_size)

    def begin_chain(self, rng: Any) -> None:
        """Forget the last chain."""
        self.rng = get_random_generator(rng, copy=False)
        self.tune = True
        self.state: SamplerState | None = None
        self.n_draws = 0
        self.iter_count = 0
        self.divergences = 0
        self.step_adapt = DualAverageAdaptation(
            self.first_step_size, self.target_accept, gamma=0.05, k=0.75, t0=10
        )  # PyMC's constants
        self.begin()

    def density(self, position: Array) -> tuple[float, Array]:
        """Return log p and its gradient in double precision, or −∞ if they cannot be computed.

        Far out on a trajectory a model may factorise a matrix that is not positive definite or
        divide by zero. That is a divergence, as in PyMC's HMC, and must not end the run.
        """
        try:
            logp, gradient = self.function(position.astype(self.dtype, copy=False))
        except (LinAlgError, ArithmeticError):
            return -math.inf, np.full(position.shape, math.nan)
        return float(logp), np.asarray(gradient, dtype=float)

    def step(self, point: Mapping[str, Array]) -> tuple[Any, list[dict[str, Any]]]:
        """Make one draw from ``point``, in which parameters may have any order."""
        if not self.shared:  # otherwise PyMC picks them by name
            point = {name: point[name] for name in self.var_names}
        with DelayedInterrupt(), self.one_blas_thread():
            return super().step(point)

    def astep(self, q0: Any) -> tuple[Array, list[dict[str, Any]]]:
        """Make one draw."""
        wall = time.perf_counter()
        process = time.process_time()
        state = self._state_at(q0)
        is_adapting = self.tune and self.is_auto
        step_size = self.first_step_size
        if self.is_auto:
            step_size = float(self.step_adapt.current(is_adapting))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            state, info = self.draw(state, step_size)
        self.state = state
        step_size_bar = step_size
        if self.is_auto:
            self.step_adapt.update(info["accept"], is_adapting)
            step_size_bar = float(self.step_adapt.current(False))
        warning = self._warning(info.pop("message", None), info["diverging"])
        self.divergences += info["diverging"] and not self.tune
        self.iter_count += 1
        self.n_draws += 1
        stats = {
            **info,
            "step_size": step_size,
            "step_size_bar": step_size_bar,
            "divergences": self.divergences,
            "process_time_diff": time.process_time() - process,
            "perf_counter_diff": time.perf_counter() - wall,
            "perf_counter_start": wall,
            "warning": warning,
        }
        return state.position.astype(self.dtype), [stats]

    def _state_at(self, q0: Any) -> SamplerState:
        """Return the last state if it is still right, or a new one.

        The gradient at the last draw is known, unless another step has moved the chain or has
        changed what the density depends on.
        """
        last = self.state
        if (
            last is not None
            and not self.shared
            and np.array_equal(last.position.astype(self.dtype), q0.data)
        ):
            return last
        state = self.init(np.asarray(q0.data, dtype=float), self.density)
        if not (math.isfinite(state.logp) and np.isfinite(state.gradient).all()):
            raise SamplingError(
                f"{type(self).__name__}: the log-density of {', '.join(self.var_names)} is "
                f"{state.logp:.3g} at the chain's position, or its gradient isn't finite. Find "
                "the cause with model.debug(), or pass other initvals to pm.sample."
            )
        return state

    def _warning(self, message: str | None, is_diverging: bool) -> SamplerWarning | None:
        if message:
            return SamplerWarning(WarningType.BAD_PARAMS, message, "warn", self.iter_count)
        if is_diverging:
            kind = WarningType.TUNING_DIVERGENCE if self.tune else WarningType.DIVERGENCE
            text = "The energy changed by more than 1,000, or isn't finite, along a trajectory."
            return SamplerWarning(kind, text, "debug", self.iter_count)
        return None

    @staticmethod
    def competence(var: Any, has_grad: bool) -> Competence:
        """PyMC never assigns this step to a variable itself; it chooses NUTS."""
        return Competence.INCOMPATIBLE

    @staticmethod
    def _progressbar_config(n_chains: int = 1) -> tuple[list[TextColumn], dict[str, Any]]:
        columns = [
            TextColumn("{task.fields[divergences]}", table_column=Column("Divergences", ratio=1)),
            TextColumn("{task.fields[step_size]:0.3f}", table_column=Column("Step size", ratio=1)),
            TextColumn("{task.fields[n_steps]}", table_column=Column("Grad evals", ratio=1)),
        ]
        start = dict.fromkeys(("divergences", "step_size", "n_steps"), 0)
        return columns, {name: [value] * n_chains for name, value in start.items()}

    @staticmethod
    def _make_progressbar_update_functions() -> tuple[Callable[..., dict[str, Any]], ...]:
        def update_stats(stats: dict[str, Any]) -> dict[str, Any]:
            shown = {key: stats[key] for key in ("divergences", "step_size", "n_steps")}
            return shown | {"failing": stats["divergences"] > 0}

        return (update_stats,)


def _is_auto(step_size: Any) -> bool:
    """Check the argument ``step_size``."""
    if isinstance(step_size, str) and step_size == "auto":
        return True
    if is_number(step_size) and math.isfinite(step_size) and step_size > 0:
        return False
    raise ValueError(
        f'step_size={step_size!r}: pass "auto" or a finite number above zero, the length ε '
        "of a leapfrog step."
    )


def _check_target_accept(target_accept: Any) -> None:
    if not (is_number(target_accept) and 0 < target_accept < 1):
        raise ValueError(
            f"target_accept={target_accept!r}: must be a number between 0 and 1, the mean "
            "acceptance probability to aim at."
        )
