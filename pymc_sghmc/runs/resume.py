"""Go on with a run that was killed, from what PyMC's ``ZarrTrace`` has stored of it.

``pm.sample`` samples as in the first run. Each chain's stored draws are passed over, its steps take
up the state stored with them, and what follows is what an uninterrupted run would have drawn.
Contains no formula of a sampler.
"""

import logging
import os

import numpy as np
import pymc as pm
import xarray as xr

from pymc.backends.zarr import ZarrChain, ZarrTrace
from pymc.model import modelcontext
from pymc.step_methods.compound import StatsBijection
from pymc.util import drop_warning_stat, get_random_generator

from pymc_sghmc.compat import inference_data

__all__ = ["resume"]

DRAWS = ("posterior", "unconstrained_posterior", "sample_stats")
DATA = ("constant_data", "observed_data")
DAMAGED = object()

_log = logging.getLogger(__name__)


def resume(trace, *, step, model=None, **kwargs):
    """Make the draws that a killed run still owes, the same that it would have made.

    For runs of ``pm.sample(trace=ZarrTrace(store, include_transformed=True), ...)`` with a step
    method of this package. Each chain goes on after its last stored draw, and chains that hadn't
    begun begin as they would have. All draws are in the same store in the end. Errors come before
    anything is sampled or changed in the store.

    Parameters
    ----------
    trace : path, zarr store or ZarrTrace
        Where the killed run stored its draws. Don't make a new ``ZarrTrace`` of the path: that
        deletes all that is there.
    step : step method or list of them
        Built anew, with the arguments that it had in the killed run.
    model : Model, optional
        The model; taken from the ``with`` context by default.
    **kwargs
        Other arguments of ``pm.sample`` as in the killed run, such as ``initvals``. ``cores``,
        ``mp_ctx``, ``progressbar`` and those of the result may change. ``draws``, ``tune``,
        ``chains`` and ``random_seed`` are known from the store and may be left out.

    Returns
    -------
    InferenceData (PyMC 5), DataTree (PyMC 6) or ZarrTrace
        What ``pm.sample`` returns; for a finished run, what it has stored.

    Examples
    --------
    A run that ends at its 30th draw, as if killed, and the rest of it:

    >>> import tempfile
    >>> import numcodecs, numpy as np, pymc as pm, zarr
    >>> numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE = True
    >>> from pymc.backends.zarr import ZarrTrace
    >>> from pymc_sghmc import SGHMC, resume
    >>> path = tempfile.mkdtemp()
    >>> def kill(trace, draw):
    ...     if draw.draw_idx == 30:
    ...         raise MemoryError
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("y", mu, 1, observed=np.arange(50.0))
    ...     options = {"step": SGHMC(batch_size=10), "cores": 1, "progressbar": False}
    ...     trace = ZarrTrace(zarr.DirectoryStore(path), include_transformed=True)
    ...     try:
    ...         pm.sample(40, tune=10, chains=2, trace=trace, callback=kill, **options)
    ...     except MemoryError:
    ...         idata = resume(path, compute_convergence_checks=False, **options)
    >>> dict(idata.posterior.sizes)
    {'chain': 2, 'draw': 40}
    """
    model = modelcontext(model)
    killed = _KilledRun(_opened(trace))
    kwargs = killed.arguments(**kwargs)
    if killed.is_finished:
        return killed.result(**kwargs)
    return pm.sample(step=step, model=model, trace=killed, **kwargs)


class _KilledRun(ZarrTrace):
    """The store of a killed run, for ``pm.sample`` to write what is missing."""

    def __init__(self, root):
        flags = root["sample_stats/in_warmup"]
        transformed = "unconstrained_posterior" in root
        super().__init__(draws_per_chunk=flags.chunks[1], include_transformed=transformed)
        self.stored, self.compressor = root, flags.compressor  # self.root is new and in memory
        self.chains, self.tune = len(flags), int(root["_sampling_state/tuning_steps"][()])
        self.draws, is_split = _draws(root, self.tune)
        self.states = [_read(root["_sampling_state/sampling_state"], i) for i in range(self.chains)]
        self.made = [_count(state) for state in self.states]
        self.is_finished = is_split and min(self.made) == self.tune + self.draws
        if self.is_finished:
            return
        _join(root, self.tune, self.draws)
        for chain, made in enumerate(self.made):
            if made < 0 or not self._has_draws(chain, made):
                self.states[chain], self.made[chain] = None, 0
                _log.warning(
                    f"resume: of chain {chain} the state or some draws are damaged or don't belong "
                    "together. This chain begins anew, and will make the same draws again."
                )
        if not any(self.made):
            raise ValueError(
                "trace: there is no chain to go on with: the run was killed before any draws were "
                "stored, or they are damaged. Call pm.sample anew."
            )

    def _has_draws(self, chain, made) -> bool:
        """Whether all that the state follows is stored, and can be read."""
        for _, array in _arrays(self.stored):
            if array.basename.endswith("__model_logp"):
                continue  # compound steps record only the last step's
            keys = _chunk_keys(array, chain)[: -(-made // array.chunks[1])]
            if not all(key in array.chunk_store for key in keys):
                return False
            if made and _read(array, (chain, slice(made))) is DAMAGED:
                return False
        return True

    def _clear(self, chain, made):
        """Remove what a chain has stored after its state: it may be damaged."""
        for _, array in _arrays(self.stored):
            for key in _chunk_keys(array, chain)[-(-made // array.chunks[1]) :]:
                array.chunk_store.pop(key, None)
        if not made:
            states = self.stored["_sampling_state/sampling_state"]
            states.chunk_store.pop(states._chunk_key((chain,)), None)

    def arguments(self, callback=None, random_seed=None, **kwargs):
        """Return ``pm.sample``'s arguments, those of the killed run added."""
        for name in ("draws", "tune", "chains"):
            known = getattr(self, name)
            if kwargs.setdefault(name, known) != known:
                raise ValueError(f"{name}={kwargs[name]}: the killed run had {name}={known}.")
        generator = self._generator()
        if random_seed is not None:
            given = get_random_generator(random_seed).bit_generator.seed_seq
            if given.state != generator.bit_generator.seed_seq.state:
                raise ValueError(f"random_seed={random_seed}: the killed run had another seed.")
        if callback is not None:
            kwargs["callback"] = lambda trace, draw: (
                draw.draw_idx < self.made[draw.chain] or callback(trace=trace, draw=draw)
            )
        return {**kwargs, "random_seed": generator}

    def _generator(self):
        """Return the generator of which PyMC spawned those of the chains, and will again."""
        chain = int(np.argmax(self.made))
        state, depth = self.states[chain], 1
        while hasattr(state, "methods"):  # a compound step spawns in its turn
            state, depth = state.methods[0], depth + 1
        known, kind = state.rng.seed_seq_state, state.rng.bit_generator_state["bit_generator"]
        seed = np.random.SeedSequence(
            known["entropy"],
            spawn_key=known["spawn_key"][:-depth],
            pool_size=known["pool_size"],
            n_children_spawned=known["spawn_key"][-depth] - chain,
        )
        return np.random.Generator(getattr(np.random, kind)(seed))

    def init_trace(self, *, step, model, test_point=None, **kwargs):
        """Check that model and steps are those of the killed run, and let its chains go on."""
        super().init_trace(step=step, model=model, test_point=test_point, **kwargs)
        self._check_model(model)
        self._check_step(step)
        self.root = self.stored
        self.straces = [
            _KilledChain(
                store=self.root.store,
                model=model,
                vars=self.vars,
                test_point=test_point,
                stats_bijection=StatsBijection(step.stats_dtypes),
                draws_per_chunk=self.draws_per_chunk,
                fn=self.fn,
            )
            for _ in range(self.chains)
        ]
        for chain, (strace, made) in enumerate(zip(self.straces, self.made, strict=True)):
            self._clear(chain, made)
            strace.begin_after(made, self.states[chain], *self._last_draw(chain, made, model))
            strace.setup(draws=self.tune + self.draws, chain=chain, sampler_vars=None)

    def _check_model(self, model):
        """Compare with the layout, and the data, that a new store would have."""
        new, old = _layout(self.root), _layout(self.stored)
        names = {path.split("/")[1] for path in old}
        for var in model.value_vars:
            if var.name not in names:
                raise ValueError(
                    f"trace: {var.name} isn't stored, and chains can't go on without. Runs to be "
                    "resumed need ZarrTrace(store, include_transformed=True), and no var_names."
                )
        for path in sorted(new.keys() | old.keys()):
            if new.get(path) != old.get(path):
                raise ValueError(
                    f"model, step: {path} of the killed run is another, or only in one of the two. "
                    "Pass the same model, with the same data, and the same steps."
                )

    def _check_step(self, step):
        """Let the step take up each state, which its settings may forbid, and its own again."""
        own = step.sampling_state
        try:
            for state in filter(None, self.states):
                step.sampling_state = state
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"step: it isn't that of the killed run, or has other settings. {error}"
            ) from error
        finally:
            step.sampling_state = own

    def _last_draw(self, chain, made, model):
        """Point and statistics of a chain's last stored draw."""
        if not made:
            return {}, {}
        draws = {**self.stored["posterior"], **self.stored.get("unconstrained_posterior", {})}
        stats = {
            name: array[chain, made - 1]
            for name, array in self.stored["sample_stats"].items()
            if array.ndim >= 2 and not name.endswith("warning")  # which would be logged again
        }
        return {var.name: draws[var.name][chain, made - 1] for var in model.value_vars}, stats

    def result(self, *, return_inferencedata=True, keep_warning_stat=False, **kwargs):
        """Return what ``pm.sample`` has returned of a finished run."""
        self.root = self.stored
        if not return_inferencedata:
            return self
        idata = self.to_inferencedata(save_warmup=not kwargs.get("discard_tuned_samples", True))
        return idata if keep_warning_stat else drop_warning_stat(idata)

    def to_inferencedata(self, save_warmup=False, eager=True):
        """Read all groups; PyMC's own conversion needs an xarray that still reads zarr 2."""
        self.split_warmup_groups()
        attrs = {"tuning_steps": self.tuning_steps, "sampling_time": self.sampling_time}
        datasets = {}
        for name, group in self.root.groups():
            if not name.startswith("_" if save_warmup else ("_", "warmup_")):
                arrays = {
                    key: (array.attrs["_ARRAY_DIMENSIONS"], array[...])
                    for key, array in group.arrays()
                }
                datasets[name] = xr.Dataset(arrays, attrs=attrs)
        return inference_data(datasets)


class _KilledChain(ZarrChain):
    """Records what follows the stored draws of one chain, and has its steps begin there."""

    def begin_after(self, made, state, point, stats):
        """Pass over so many draws, then take up this state at this point."""
        self.draw_idx = self.made = made
        self.state, self.point = state, point
        self.stats = self.stats_bijection.rmap(stats)
        self.n_passed = self.n_recorded = 0

    def link_stepper(self, step):
        """Meet the step at the start of the chain, in the process that samples it."""
        super().link_stepper(step)
        vars(step).pop("step", None)
        if self.made:
            step.step = self.pass_over  # in place of the method, until the stored draws are over

    def pass_over(self, point):
        """Stand in for ``step`` at a stored draw."""
        step, self.n_passed = self._step_method, self.n_passed + 1
        if self.n_passed == self.made:
            del step.step
            step.sampling_state = self.state
            point = {**point, **self.point}
        return point, self.stats

    def record(self, draw, stats, *, in_warmup):
        """Record new draws only."""
        self.n_recorded += 1
        return (
            super().record(draw, stats, in_warmup=in_warmup)
            if self.n_recorded > self.made
            else None
        )

    def record_sampling_state(self, step=None):
        """Record states with the draws that they follow, and not in the middle of a draw.

        PyMC passes ``step`` when it closes a chain, at an interruption in the middle of a draw, too.
        """
        if step is None:
            super().record_sampling_state()


def _opened(trace):
    """Open the store for writing, without deleting what is in it."""
    import zarr

    store = trace.root.store if isinstance(trace, ZarrTrace) else trace
    store = os.fspath(store) if isinstance(store, (str, os.PathLike)) else store
    if isinstance(store, str) and not os.path.exists(store):
        raise ValueError(f"trace={store!r}: there is nothing at this path.")
    try:
        root = zarr.open_group(store, mode="r+")
        if isinstance(root.store, zarr.storage.MemoryStore):
            raise ValueError("it is in memory")
        root["sample_stats/in_warmup"], root["_sampling_state/sampling_state"]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"trace={trace!r}: no run of pm.sample is stored there, or it was killed before it "
            f"began to sample ({error}). Call pm.sample anew."
        ) from error
    return root


def _read(array, selection):
    """Read a part of an array; None where nothing is, DAMAGED where it can't be read."""
    try:
        return array[selection]
    except Exception as error:  # whatever codecs raise
        if "NUMCODECS_ALLOW_UNSAFE_PICKLE_DECODE" in str(error):
            raise
        return DAMAGED


def _count(state) -> int:
    """How many draws the steps had made in a state, as ours count them; −1 if they don't agree."""
    if state is None or state is DAMAGED:
        return 0 if state is None else -1
    leaves = [state]
    while any(hasattr(leaf, "methods") for leaf in leaves):
        leaves = [new for leaf in leaves for new in getattr(leaf, "methods", [leaf])]
    counts = {leaf.n_draws for leaf in leaves if hasattr(leaf, "n_draws")}
    if not counts:
        raise ValueError("trace: resume needs a step method of this package in the killed run.")
    return counts.pop() if len(counts) == 1 else -1


def _arrays(root):
    """All arrays of draws, with the group that each is in."""
    for group in DRAWS:
        for _, array in root[group].arrays() if group in root else ():
            if array.attrs["_ARRAY_DIMENSIONS"][:2] == ["chain", "draw"]:
                yield group, array


def _chunk_keys(array, chain):
    """Return the keys of the files that hold a chain's draws, in their order."""
    rest = [0] * (array.ndim - 2)
    return [array._chunk_key((chain, i, *rest)) for i in range(array.cdata_shape[1])]


def _layout(root):
    """Shape, type and, but for draws, contents of all arrays that don't depend on sampling."""
    return {
        f"{group}/{name}": (
            array.shape,
            array.dtype,
            (group in DRAWS and array.ndim > 1) or array[...].tobytes(),
        )
        for group in (*DRAWS, *DATA)
        for name, array in (root[group].arrays() if group in root else ())
    }


def _draws(root, tune):
    """Draws after tuning, and whether PyMC has moved all tuning draws to groups of their own."""
    lengths = {array.shape[1] for _, array in _arrays(root)}
    moved = tune == 0 or all(
        f"warmup_{group}/{array.basename}" in root for group, array in _arrays(root)
    )
    is_split = moved and len(lengths) == 1
    return max(lengths) - (0 if is_split else tune), is_split


def _join(root, tune, draws):
    """Put the tuning draws back where PyMC has moved them, at an interruption."""
    for group, array in _arrays(root):
        if array.shape[1] == draws and tune:
            attrs = array.attrs.asdict()
            new = root[group].array(
                array.basename,
                np.concatenate([root[f"warmup_{group}/{array.basename}"][...], array[...]], axis=1),
                chunks=array.chunks,
                fill_value=array.fill_value,
                object_codec=(array.filters or [None])[0],
                compressor=array.compressor,
                overwrite=True,
            )
            new.attrs.update(attrs)
    for group in DRAWS:
        if f"warmup_{group}" in root:
            root[group].array("draw", np.arange(tune + draws), overwrite=True).attrs.update(
                {"_ARRAY_DIMENSIONS": ["draw"]}
            )
            del root[f"warmup_{group}"]
