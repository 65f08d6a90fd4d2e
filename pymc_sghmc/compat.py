"""Every difference between PyMC 5 and PyMC 6.

One function or class each, with the versions that it serves and what to delete when they go.
Knows versions and their features; knows no samplers and no mathematics.
"""

import inspect
import math
import sys

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr

from pymc.backends.base import BaseTrace
from pymc.step_methods.compound import BlockedStep
from pymc.util import get_random_generator
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.tensor.basic import Split
from pytensor.tensor.subtensor import indices_from_subtensor
from pytensor.tensor.type_other import NoneTypeT

from pymc_sghmc.checks import check_call
from pymc_sghmc.pymc_hooks import end_with_parent, one_blas_thread

try:  # PyTensor 3 (PyMC 6). With PyMC 5's end, keep this line alone.
    from pytensor.graph.traversal import ancestors, io_toposort
except ImportError:  # PyTensor 2 (PyMC 5.28)
    from pytensor.graph.basic import ancestors, io_toposort

try:  # PyTensor 2 (PyMC 5.28). With PyMC 5's end, delete this and its uses.
    from pytensor.tensor.extra_ops import BroadcastTo
except ImportError:  # PyTensor 3 broadcasts with Alloc
    from pytensor.tensor.basic import Alloc as BroadcastTo

try:  # PyTensor 3: softmax, logsumexp and others are built for the static shapes of their inputs
    from pytensor.compile.builders import SymbolicOp
except ImportError:  # PyTensor 2 has none of these. With PyMC 5's end, keep the import alone.
    SymbolicOp = ()

try:  # PyTensor 3. With PyMC 5's end, keep this line alone.
    from pytensor.compile.rewriting import inline_ofg_node
except ImportError:  # PyTensor 2
    from pytensor.tensor.rewriting.ofg import inline_ofg_node

try:  # PyTensor 3. With PyMC 5's end, keep this line alone.
    from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
except ImportError:  # PyTensor 2
    from pytensor.tensor.slinalg import SolveTriangular

try:  # PyMC 6. With PyMC 5's end, keep these lines alone.
    from pymc.backends import _ZarrChainBase as _StoredChain
    from pymc.backends import _ZarrTraceBase as StoredTrace
except ImportError:  # PyMC 5.28; it doesn't need zarr to be imported
    from pymc.backends.zarr import ZarrChain as _StoredChain
    from pymc.backends.zarr import ZarrTrace as StoredTrace

__all__ = [
    "FAILING",
    "LAST",
    "ArrayOperation",
    "BroadcastTo",
    "ChainSetup",
    "SolveTriangular",
    "StoredChainTrace",
    "StoredTrace",
    "SymbolicOp",
    "WithoutInnerGraphs",
    "add_trigamma_to_numba",
    "adds_to_rows",
    "ancestors",
    "elpd_data",
    "index_entries",
    "indexes_leading_axes",
    "inference_data",
    "is_row_selection",
    "joined_along",
    "lengths_of_parts",
    "sample_stored_chains_without_zarr",
    "smoothed_log_weights",
    "toposort",
]


LAST = 1000  # among PyTensor's rewrites: after all that may add operations
# Rewrites that fail where they meet x[128:][0], as the first value of a random walk is in a
# position: NumPy can't add 128 to the index, which has a type of one byte. PyTensor goes on without
# them, and logs a traceback. The second is PyTensor 2's: with PyMC 5's end, delete it, and all of
# this when no PyTensor does that.
FAILING = ("local_subtensor_merge_slice", "local_subtensor_merge")


class WithoutInnerGraphs(GraphRewriter):
    """Replaces operations that are graphs of others, which PyTensor compiles one by one with C.

    In PyTensor 3 (PyMC 6) softmax and logsumexp are such.
    """

    def apply(self, fgraph: FunctionGraph) -> None:
        """Replace them all."""
        while whole := [n for n in fgraph.apply_nodes if isinstance(n.op, OpFromGraph)]:
            for node in whole:
                pairs = zip(node.outputs, inline_ofg_node(node), strict=True)
                fgraph.replace_all(list(pairs), reason="graph of operations")


class ArrayOperation(Op):
    """An operation with a gradient, ``pullback``, and ``shapes_of_outputs``, given the inputs'.

    PyTensor 2 (PyMC 5.28) calls ``L_op`` instead, and tells ``infer_shape`` of the graph, too. With
    PyMC 5's end, use `Op` itself.
    """

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shapes of the outputs; the last argument has those of the inputs."""
        found: list[Any] = self.shapes_of_outputs(arguments[-1])
        return found

    if not hasattr(Op, "pullback"):

        def L_op(
            self,
            inputs: Sequence[Variable],
            outputs: Sequence[Variable],
            slopes: Sequence[Variable],
        ) -> list[Variable]:
            """Return the gradient by the inputs."""
            found: list[Variable] = self.pullback(inputs, outputs, slopes)
            return found


@cache
def add_trigamma_to_numba() -> None:
    """Give Numba a compiled trigamma function where PyTensor has none (2.38 and 3.3).

    Without it gradients of Gamma, Beta, Student t and negative binomial likelihoods fall back to
    Python, which is slow, and PyTensor warns of "object mode". Delete when PyTensor compiles it.
    """
    try:
        from pytensor.link.numba.dispatch import basic, scalar
        from pytensor.scalar.basic import ScalarOp
        from pytensor.scalar.math import TriGamma
    except ImportError:  # without Numba there is nothing to add to
        return
    dispatched = basic.numba_funcify_and_cache_key.dispatch
    if hasattr(TriGamma, "nfunc_spec") or dispatched(TriGamma) is not dispatched(ScalarOp):
        return
    register = getattr(scalar, "register_scalar_funcify", basic.register_funcify_and_cache_key)

    @register(TriGamma)  # type: ignore[untyped-decorator]
    def numba_trigamma(op: Any, node: Any, **kwargs: Any) -> tuple[Any, str]:
        return basic.numba_njit(_trigamma), scalar.scalar_op_cache_key(op)


def _trigamma(x: float) -> float:
    """Second derivative of log Γ(x): the recurrence up to 15, then the asymptotic series."""
    if x <= 0 and x == math.floor(x):
        return math.inf
    z = 1 - x if x < 0 else x
    value = 0.0
    while z < 15:
        value += 1 / z**2
        z += 1
    y = 1 / z**2
    series = 1 + y * (1 / 6 - y * (1 / 30 - y * (1 / 42 - y * (1 / 30 - y * (5 / 66)))))
    value += y / 2 + series / z
    if x < 0:  # reflection
        return (math.pi / math.sin(math.pi * x)) ** 2 - value
    return value


class ChainSetup(BlockedStep):
    """Gives a step method one hook, ``begin_chain(rng)``, before each chain.

    Its draws are to be made ``with self.one_blas_thread()``.

    PyMC 5.28 calls ``set_rng(rng)``, PyMC 6 ``setup_chain(rng, tune, draws)``, with the chain's
    generator and before its first draw, in workers too. With PyMC 5's end, delete ``set_rng``.
    """

    one_blas_thread: Callable[[], AbstractContextManager[None]] = nullcontext

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the call first: PyMC's own ``__new__`` takes any argument and fails obscurely."""
        vars = args[0] if args else kwargs.get("vars")
        kwargs["model"] = check_call(cls, vars, kwargs, kwargs.get("model"))
        add_trigamma_to_numba()
        return super().__new__(cls, *args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the arguments of ``__init__``, which PyMC's ``__new__(*args, **kwargs)`` hides."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.signature(cls.__init__.__get__(cls))

    def begin_chain(self, rng: np.random.Generator) -> None:
        """Reset all that belongs to one chain; ``rng`` is the chain's generator."""
        raise NotImplementedError

    def setup_chain(self, rng: Any, tune: int | None = None, draws: int | None = None) -> None:
        """Start a chain (PyMC 6)."""
        self.one_blas_thread = one_blas_thread()
        end_with_parent()
        self.begin_chain(get_random_generator(rng, copy=False))

    set_rng = setup_chain  # PyMC 5.28


class StoredChainTrace(_StoredChain, BaseTrace):
    """A chain of a stored run, as PyMC's ``ZarrTrace`` has them (5.28 and 6): without zarr.

    PyMC calls its hooks in the process that samples, whatever ``cores`` is: ``link_stepper(step)``
    before the first draw, ``record(point, stats, in_warmup=...)`` after each,
    ``record_sampling_state`` and, in the main process, ``close()`` at the end.
    """

    _posterior = SimpleNamespace(store=None)  # PyMC looks whether its store is in memory

    def __init__(
        self,
        model: pm.Model,
        vars: list[Any],
        *,
        fn: Callable[..., list[np.ndarray]],
        var_shapes: dict[str, tuple[int, ...]],
        var_dtypes: dict[str, np.dtype],
    ) -> None:
        BaseTrace.__init__(  # that of ZarrChain (5.28) opens a store of zarr's
            self, model=model, vars=vars, fn=fn, var_shapes=var_shapes, var_dtypes=var_dtypes
        )


def sample_stored_chains_without_zarr() -> None:
    """Let PyMC sample chains of a stored run in processes where zarr can't be imported.

    With ``cores`` above one PyMC 6 imports ``zarr.storage.MemoryStore``, to see whether chains are
    stored there, even if they have nothing to do with zarr. Where that import fails, it gets a
    class of which no store is. Delete when PyMC asks the chain instead.
    """
    try:
        import zarr.storage  # noqa: F401
    except Exception:  # zarr is missing, or fails beside this NumPy
        module = ModuleType("zarr.storage")
        module.MemoryStore = type("MemoryStore", (), {})  # type: ignore[attr-defined]
        sys.modules["zarr.storage"] = module


def inference_data(datasets: dict[str, xr.Dataset]) -> Any:
    """Return datasets, by group, as what ``pm.sample`` returns.

    That is ArviZ's InferenceData in PyMC 5.28 and xarray's DataTree in PyMC 6. With PyMC 5's end,
    keep the last line alone.
    """
    if pm.__version__.startswith("5."):
        import arviz as az

        return az.InferenceData(**datasets)
    return xr.DataTree.from_dict(datasets)


def smoothed_log_weights(log_likelihood: np.ndarray, reff: float) -> tuple[np.ndarray, np.ndarray]:
    """Return Pareto-smoothed log weights that leave out each row, and the Pareto k of each.

    ArviZ's own, from log-likelihoods of shape (row, draw). ArviZ 0.23 (PyMC 5.28) has ``az.psislw``
    of log ratios; ArviZ 1 (PyMC 6) has an accessor of xarray, for log-likelihoods. With PyMC 5's
    end, delete the first branch.
    """
    import arviz as az  # which brings the accessor

    if hasattr(az, "psislw"):
        return az.psislw(-log_likelihood, reff=reff)
    of_rows: Any = xr.DataArray(log_likelihood, dims=("row", "draw"))
    weights, pareto_k = of_rows.azstats.psislw(r_eff=reff, dim="draw")
    return weights.values, pareto_k.values


def elpd_data(**fields: Any) -> Any:
    """Return ArviZ's object for an estimate by leave-one-out, of all rows or of a sample.

    ArviZ 1 (PyMC 6) has a class for estimates from a sample of rows; all fields are its own. ArviZ
    0.23 (PyMC 5.28) has one class, a series with other names, which takes more entries. With
    PyMC 5's end, delete the first branch.
    """
    import arviz as az

    if not hasattr(az, "ELPDDataLOO"):
        names = {"elpd": "elpd_loo", "p": "p_loo", "elpd_i": "loo_i"}
        entries = {names.get(name, name): value for name, value in fields.items()}
        entries |= {"scale": "log"}
        entries = {name: value for name, value in entries.items() if value is not None}
        return az.ELPDData(data=list(entries.values()), index=list(entries))
    if fields["subsample_size"] < fields["n_data_points"]:
        return az.ELPDDataLOOSubsample(**fields, scale="log")
    own = az.ELPDDataLOO.__dataclass_fields__
    result = az.ELPDDataLOO(**{k: v for k, v in fields.items() if k in own}, scale="log")
    result["subsample_size"] = fields["subsample_size"]
    result["subsampling_se"] = fields["subsampling_se"]
    return result


def joined_along(node: Apply) -> tuple[int | None, int]:
    """Axis of a ``Join``, None where it isn't constant, and how many arrays it joins.

    The axis is the first input in PyTensor 2 and an attribute in PyTensor 3. With PyMC 5's end,
    keep the first line.
    """
    if hasattr(node.op, "axis"):
        return node.op.axis, len(node.inputs)
    return getattr(node.inputs[0], "data", None), len(node.inputs) - 1


def lengths_of_parts(node: Apply) -> tuple[int, list[int]] | None:
    """Axis and lengths of the parts that a node takes an array apart into, if they are known.

    The axis of a `Split` is an input in PyTensor 2. With PyMC 5's end, it is the operation's alone.
    """
    if type(node.op) is not Split or not all(isinstance(v, Constant) for v in node.inputs[1:]):
        return None
    *axis, lengths = (v.data for v in node.inputs[1:])
    return int(axis[0] if axis else node.op.axis), [int(length) for length in lengths]


def is_row_selection(variable: Variable) -> bool:
    """Whether a variable is ``x[rows]`` for a vector of indices.

    PyTensor 2 has an operation of its own for it, PyTensor 3 a case of its general one.
    """
    node = variable.owner
    return (
        node is not None
        and type(node.op).__name__ in ("AdvancedSubtensor1", "AdvancedSubtensor")
        and len(node.inputs) == 2
        and node.inputs[1].type.ndim == 1
        and indexes_leading_axes(node)
    )


def adds_to_rows(node: Any) -> bool:
    """Whether a node adds to chosen rows of an array.

    PyTensor 2 has an operation of its own for it, which takes a single row for a broadcast one and
    refuses it, PyTensor 3 a case of its general one.
    """
    return (
        type(node.op).__name__ in ("AdvancedIncSubtensor1", "AdvancedIncSubtensor")
        and not node.op.set_instead_of_inc
        and len(node.inputs) == 3
        and node.inputs[2].type.ndim == 1
        and node.inputs[2].type.dtype.startswith(("int", "uint"))
        and getattr(node.op, "idx_list", (0,)) == (0,)
    )


def indexes_leading_axes(node: Apply) -> bool:
    """Whether the indices of an ``AdvancedSubtensor`` stand for the leading axes, one by one.

    PyTensor 3 has a list of them, in which slices may stand, too; in PyTensor 2 slices are inputs.
    """
    plain = tuple(range(len(node.inputs) - 1))
    return tuple(getattr(node.op, "idx_list", plain)) == plain


def _slice_of(entry: Variable) -> slice | None:
    """Return the slice that PyTensor 2 has as an input; None of another input."""
    if isinstance(getattr(entry, "data", None), slice):
        return entry.data
    if entry.owner is None or type(entry.owner.op).__name__ != "MakeSlice":
        return None
    return slice(*(None if isinstance(v.type, NoneTypeT) else v for v in entry.owner.inputs))


def index_entries(node: Apply) -> list[Any] | None:
    """Entries of the index that a node picks by, variables and slices; None of other nodes.

    Slices are inputs in PyTensor 2. With PyMC 5's end, keep the first two lines and the last.
    """
    if type(node.op).__name__ not in ("Subtensor", "AdvancedSubtensor1", "AdvancedSubtensor"):
        return None
    if hasattr(node.op, "idx_list") and node.op.idx_list is not None:
        return list(indices_from_subtensor(node.inputs[1:], node.op.idx_list))
    entries = []
    for entry in node.inputs[1:]:
        if not hasattr(entry.type, "ndim"):
            entry = _slice_of(entry)
            if entry is None:
                return None
        entries.append(entry)
    return entries


def toposort(outputs: Iterable[Variable], leaves: Iterable[Variable]) -> list[Apply]:
    """Apply nodes between ``leaves`` and ``outputs`` in order of evaluation (PyTensor 2 and 3)."""
    return io_toposort(list(leaves), list(outputs))
