"""A PyTensor mode for functions of many rows: every operation is NumPy's own, nothing is compiled.

Over thousands of rows NumPy's loops are about as fast as compiled ones, and a function is ready in
a tenth of a second, where Numba takes seconds and C tens of them. PyTensor has such a mode but for
a few operations that it evaluates number by number in Python; those get functions of arrays here.
The others are called without PyTensor's checks of each call, which take five times as long as an
operation with the few hundred numbers of groups.
"""

import threading

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pymc.pytensorf import compile
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.link.vm import VMLinker
from pytensor.scalar.basic import Switch
from pytensor.scan.op import Scan
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.subtensor import AdvancedSubtensor
from pytensor.tensor.type import discrete_dtypes
from pytensor.tensor.utils import import_func_from_string

from pymc_sghmc.compat import (
    FAILING,
    LAST,
    WithoutInnerGraphs,
    adds_to_rows,
    ancestors,
    index_entries,
)
from pymc_sghmc.loops.array_operations import (
    ELEMENTWISE,
    OfArrays,
    RowsOfArray,
    ViewOfArray,
    taken,
    with_rows_added,
)
from pymc_sghmc.loops.backends import is_compiled_by_default

__all__ = ["ThreadSafe", "compile_for_many_rows", "without_traces"]

FUSING = "fusion", "inplace", "local_pow_to_nested_squaring"  # NumPy has no fused operations


def compile_for_many_rows(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    options: Mapping[str, Any],
    rewrites: Mode | None = None,
) -> "ThreadSafe":
    """Compile a function that is called with thousands of rows.

    Parameters
    ----------
    inputs, outputs : list of Variable
        Or one output alone.
    options : dict
        Keyword arguments of ``pymc.pytensorf.compile``. A ``mode`` among them is kept, as is a
        default mode of PyTensor's that somebody has chosen.
    rewrites : Mode, optional
        Whose rewrites are made, for a function that is called less often; default: all.

    Returns
    -------
    ThreadSafe
        In NumPy's mode, if every operation has a function of arrays; else in the default mode.
    """
    outputs = without_traces(outputs)
    if options.get("mode") is None and is_compiled_by_default():
        function = compile(inputs, outputs, **{**options, "mode": _numpy_mode(rewrites)})
        if all(map(_is_for_arrays, function.maker.fgraph.apply_nodes)):
            return ThreadSafe(function)
    return ThreadSafe(compile(inputs, outputs, **options))


class ThreadSafe:
    """A compiled function that several threads may call at a time: each call has a copy.

    A function keeps what it computes in places of its own. A copy has others, and compiles nothing.
    Where it would be compiled again, or has a part that copies share, as a loop is, one call waits
    for the other. Inputs are trusted to have the types that they were declared with.

    Parameters
    ----------
    function : pytensor.compile.Function

    Attributes
    ----------
    is_made_once : bool
        True: of equal pickles other processes need one function only.
    """

    is_made_once = True

    def __init__(self, function: Any) -> None:
        function.trust_input = True
        self.function = function
        self._idle = deque([function])
        self._lock = threading.Lock()
        nodes = function.maker.fgraph.apply_nodes
        self._has_copies = isinstance(function.maker.linker, VMLinker) and not any(
            isinstance(node.op, HasInnerGraph) for node in nodes
        )

    @property
    def maker(self) -> Any:
        """That of the function, which knows its graph and how it was compiled."""
        return self.function.maker

    def __call__(self, *inputs: Any) -> Any:
        """Return the function's outputs."""
        with np.errstate(all="ignore"):
            if not self._has_copies:
                with self._lock:
                    return self.function(*inputs)
            try:
                function = self._idle.pop()
            except IndexError:
                function = self._copied()
            try:
                return function(*inputs)
            finally:
                self._idle.append(function)

    def _copied(self) -> Any:
        with self._lock:
            function = self.function.copy()
        function.trust_input = True
        return function

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self.function}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["function"])  # type: ignore[misc]


def without_traces(outputs: Any) -> Any:
    """Copy a graph, or a list of them, without PyTensor's notes of the lines that built them.

    Rewrites join these notes, so that they can come to take gigabytes. Inputs and constants, which
    aren't copied, lose theirs, too.
    """
    copies = clone_replace(outputs, {})
    for variable in ancestors([copies] if isinstance(copies, Variable) else copies):
        variable.tag.trace = []
    return copies


def _numpy_mode(rewrites: Mode | None) -> Mode:
    linker = VMLinker(use_cloop=False, c_thunks=False)
    optimizer = "fast_run" if rewrites is None else rewrites.provided_optimizer
    mode = Mode(linker=linker, optimizer=optimizer).excluding(*FUSING, *FAILING)
    return mode.register((_WithFunctionsOfArrays(), LAST))


def _is_for_arrays(node: Apply) -> bool:
    """Whether a node is evaluated without a loop in Python."""
    if isinstance(node.op, Elemwise):
        return _is_ufunc(node)
    return not isinstance(node.op, Scan)


def _is_ufunc(node: Apply) -> bool:
    """Whether PyTensor itself evaluates an elementwise operation by one of NumPy's or SciPy's."""
    spec = getattr(node.op, "nfunc_spec", None)
    return spec is not None and spec[1] == len(node.inputs)


class _WithFunctionsOfArrays(GraphRewriter):
    """Replaces operations by functions of arrays, wherever one is known."""

    def apply(self, fgraph: FunctionGraph) -> None:
        """Replace them all."""
        WithoutInnerGraphs().apply(fgraph)
        for node in fgraph.toposort():
            chosen = _with_choice_inside(fgraph, node)
            if chosen is not None:
                fgraph.replace(node.outputs[0], chosen, reason="choice of arguments")
        for node in list(fgraph.apply_nodes):
            replacement = _replacement(node)
            if replacement is not None:
                fgraph.replace(node.outputs[0], replacement, reason="function of arrays")


def _with_choice_inside(fgraph: FunctionGraph, node: Apply) -> Variable | None:
    """Return f of one of two arguments for a choice between f of both; None of other nodes.

    So that of a Bernoulli distribution's log(p) and log(1 − p) each row computes one.
    """
    if not _is_elementwise(node, Switch):
        return None
    condition, *branches = node.inputs
    functions = [branch.owner for branch in branches]
    if not all(
        function is not None
        and isinstance(function.op, Elemwise)
        and function.op == functions[0].op
        and len(function.inputs) == 1
        and len(fgraph.clients[branch]) == 1
        and branch.type.broadcastable == node.outputs[0].type.broadcastable
        for function, branch in zip(functions, branches, strict=True)
    ):
        return None
    arguments = [function.inputs[0] for function in functions]
    inner = node.op(condition, *arguments)
    deeper = _with_choice_inside(fgraph, inner.owner)
    return functions[0].op(inner if deeper is None else deeper)


def _is_elementwise(node: Apply, function: type) -> bool:
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, function)


def _replacement(node: Apply) -> Variable | None:
    """Return what takes the place of a node's output, None where it stays."""
    output_type = node.outputs[0].type
    if _takes_rows(node):
        return RowsOfArray(output_type)(*node.inputs)
    if isinstance(node.op, DimShuffle):
        order = node.op.new_order
        kept = [axis for axis in order if axis != "x"]
        view = ViewOfArray(tuple(order), output_type)
        return view(*node.inputs) if kept == sorted(kept) else None
    function = _function_of(node)
    return None if function is None else OfArrays(function, output_type)(*node.inputs)


def _function_of(node: Apply) -> Callable[..., Any] | None:
    """Return the function that takes the place of a node, None where it stays."""
    if isinstance(node.op, Elemwise) and len(node.outputs) == 1:
        return _ufunc_of(node) or ELEMENTWISE.get(type(node.op.scalar_op))
    if adds_to_rows(node):
        return with_rows_added
    if _takes_alike(node):
        return taken
    return None


def _ufunc_of(node: Apply) -> np.ufunc | None:
    """Return NumPy's or SciPy's function that PyTensor itself would call."""
    # of whole numbers these may compute with few digits, unless they say yes or no
    is_of_few_digits = (
        node.inputs[0].type.dtype in discrete_dtypes and node.outputs[0].type.dtype != "bool"
    )
    if not _is_ufunc(node) or is_of_few_digits:
        return None
    if node.op.inplace_pattern:
        return None
    function = import_func_from_string(node.op.nfunc_spec[0])
    return function if isinstance(function, np.ufunc) else None


def _takes_rows(node: Apply) -> bool:
    """Whether a node takes rows of an array by whole numbers."""
    entries = index_entries(node)
    if entries is None or len(entries) != 1 or isinstance(entries[0], slice):
        return False
    index = entries[0].type
    return index.ndim == 1 and index.dtype.startswith(("int", "uint"))


def _takes_alike(node: Apply) -> bool:
    """Whether a node takes the same entries of each array of a batch, which PyTensor does in turn.

    Such is each row's own copy of a matrix of which some entries are needed.
    """
    if not (isinstance(node.op, Blockwise) and isinstance(node.op.core_op, AdvancedSubtensor)):
        return False
    indices = node.inputs[1:]
    return len(indices) == len(node.op.inputs_sig[0]) and all(
        index.type.dtype.startswith("int")
        and len(core) == 1
        and all(length == 1 for length in index.type.shape[:-1])
        for index, core in zip(indices, node.op.inputs_sig[1:], strict=True)
    )
