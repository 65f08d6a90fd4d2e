"""A killed run as a trace of PyMC's: its chains pass over what is stored, and record the rest.

Knows PyMC's traces and the states of its steps; knows no formula of a sampler.
"""

import logging

import numpy as np
import xarray as xr

from pymc.backends.zarr import ZarrChain, ZarrTrace
from pymc.step_methods.compound import StatsBijection
from pymc.util import drop_warning_stat, get_random_generator

from pymc_sghmc.compat import inference_data
from pymc_sghmc.runs.store import Damaged, Store, of_another_version

__all__ = ["KilledRun"]

_log = logging.getLogger(__name__)


class KilledRun(ZarrTrace):
    """The store of a killed run, for ``pm.sample`` to write what is missing."""

    def __init__(self, root):
        flags = root["sample_stats/in_warmup"]
        transformed = "unconstrained_posterior" in root
        super().__init__(draws_per_chunk=flags.chunks[1], include_transformed=transformed)
        self.compressor = flags.compressor
        self.stored = Store(root)  # self.root is new and in memory, until all is checked
        self.states = self.stored.states()
        self.made = [_count(state) for state in self.states]
        owed = self.stored.tune + self.stored.draws
        self.is_finished = self.stored.is_split and min(self.made) == owed
        if self.is_finished:
            return
        for chain, made in enumerate(self.made):
            if made < 0 or not self.stored.has_draws(chain, made):
                self.states[chain] = None
                self.made[chain] = 0
                _log.warning(
                    f"resume: of chain {chain} the state or some draws are damaged or don't belong "
                    "together. This chain begins anew, and will make the same draws again."
                )
        if not any(self.made):
            raise ValueError(
                "trace: there is no chain to go on with: the run was killed before any draws were "
                "stored, or they are damaged. Call pm.sample anew."
            )

    def arguments(self, callback=None, random_seed=None, **kwargs):
        """Return ``pm.sample``'s arguments, those of the killed run added."""
        for name in ("draws", "tune", "chains"):
            known = getattr(self.stored, name)
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
        state = self.states[chain]
        depth = 1
        while hasattr(state, "methods"):  # a compound step spawns in its turn
            state = state.methods[0]
            depth = depth + 1
        known = state.rng.seed_seq_state
        kind = state.rng.bit_generator_state["bit_generator"]
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
        self.root = self.stored.root
        self.stored.join(self.made)
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
            for _ in range(self.stored.chains)
        ]
        names = [var.name for var in model.value_vars]
        for chain, (strace, made) in enumerate(zip(self.straces, self.made, strict=True)):
            self.stored.clear(chain, made)
            point, stats = self.stored.last_draw(chain, made, names)
            strace.begin_after(made, self.states[chain], point, stats)
            strace.setup(draws=self.stored.tune + self.stored.draws, chain=chain, sampler_vars=None)

    def _check_model(self, model):
        """Compare with the layout, and the data, that a new store would have."""
        new = Store(self.root).layout()
        old = self.stored.layout()
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
        except AttributeError as error:  # a state without a field, or with another kind of value
            raise of_another_version(error) from error
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"step: it isn't that of the killed run, or has other settings. {error}"
            ) from error
        finally:
            step.sampling_state = own

    def result(self, *, return_inferencedata=True, keep_warning_stat=False, **kwargs):
        """Return what ``pm.sample`` has returned of a finished run."""
        self.root = self.stored.root
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
        self.state = state
        self.point = point
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
        step = self._step_method
        self.n_passed = self.n_passed + 1
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

        PyMC passes ``step`` when it closes a chain, at an interruption in the middle of a draw,
        too.
        """
        if step is None:
            super().record_sampling_state()


def _count(state) -> int:
    """How many draws the steps had made in a state, as ours count them; −1 if they don't agree."""
    if state is None or isinstance(state, Damaged):
        return 0 if state is None else -1
    leaves = [state]
    while any(hasattr(leaf, "methods") for leaf in leaves):
        leaves = [new for leaf in leaves for new in getattr(leaf, "methods", [leaf])]
    counts = {leaf.n_draws for leaf in leaves if hasattr(leaf, "n_draws")}
    if not counts:
        raise ValueError("trace: resume needs a step method of this package in the killed run.")
    return counts.pop() if len(counts) == 1 else -1
