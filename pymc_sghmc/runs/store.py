"""What PyMC's ``ZarrTrace`` has stored of a run, and how it is made ready to go on.

Knows groups, arrays and chunks of zarr; knows no steps and no models.
"""

import os

from typing import NamedTuple

import numpy as np

from pymc.backends.zarr import ZarrTrace

__all__ = ["Damaged", "Store", "of_another_version", "opened"]

DRAWS = ("posterior", "unconstrained_posterior", "sample_stats")
DATA = ("constant_data", "observed_data")


class Damaged(NamedTuple):
    """Stands for what can't be read."""

    error: Exception


def opened(trace):
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


def of_another_version(error) -> ValueError:
    """Say that states don't fit the classes of this tree."""
    return ValueError(
        "trace: the run was made by another version of pymc_sghmc, or of PyMC, and its states "
        f"can't be taken up by this one ({error}). Resume it with the versions that made it, or "
        "call pm.sample anew."
    )


class Store:
    """The arrays of a run; only `join` and `clear` change them.

    PyMC moves the tuning draws to groups of their own, at the end of a run and at an interruption,
    and may be killed while it does. What is asked here is answered as if they were in place.

    Attributes
    ----------
    root : zarr.Group
    chains, tune, draws : int
    is_split : bool
        Whether all tuning draws are in groups of their own.
    """

    def __init__(self, root):
        self.root = root
        self.chains = len(root["sample_stats/in_warmup"])
        self.tune = int(root["_sampling_state/tuning_steps"][()])
        arrays = list(self._arrays())
        lengths = {array.shape[1] for _, array in arrays}
        moved = self.tune == 0 or all(
            f"warmup_{group}/{array.basename}" in root for group, array in arrays
        )
        self.is_split = moved and len(lengths) == 1
        self.draws = max(lengths) - (0 if self.is_split else self.tune)

    def _arrays(self):
        """All arrays of draws, with the group that each is in."""
        for group in DRAWS:
            for _, array in self.root[group].arrays() if group in self.root else ():
                if array.attrs["_ARRAY_DIMENSIONS"][:2] == ["chain", "draw"]:
                    yield group, array

    def _is_moved(self, array) -> bool:
        return self.tune > 0 and array.shape[1] == self.draws

    def _parts(self, group, array, made):
        """Yield what holds the first draws of an array, and how many of them: tuning draws first."""
        if self._is_moved(array):
            yield self.root[f"warmup_{group}/{array.basename}"], min(made, self.tune)
            made = max(0, made - self.tune)
        yield array, made

    def states(self) -> list:
        """State of the steps of each chain: None where none is, Damaged where it can't be read."""
        array = self.root["_sampling_state/sampling_state"]
        states = [_read(array, chain) for chain in range(self.chains)]
        damaged = [state for state in states if isinstance(state, Damaged)]
        # Files that are cut short raise other errors. One byte that is wrong can take away a name,
        # too, but not in the states of all chains.
        unknown = [
            s for s in damaged if isinstance(s.error, ImportError | AttributeError | TypeError)
        ]
        if unknown and len(damaged) + states.count(None) == len(states):
            raise of_another_version(unknown[0].error)
        return states

    def layout(self):
        """Shape, type and, but for draws, contents of all arrays that don't depend on sampling."""
        n_draws = self.tune + self.draws
        found = {}
        for group in (*DRAWS, *DATA):
            for name, array in self.root[group].arrays() if group in self.root else ():
                shape = array.shape
                contents = True
                if group in DRAWS and array.ndim > 1:
                    shape = (shape[0], n_draws, *shape[2:])
                elif group in DRAWS and name == "draw":
                    shape = (n_draws,)
                else:
                    contents = array[...].tobytes()
                found[f"{group}/{name}"] = shape, array.dtype, contents
        return found

    def has_draws(self, chain, made) -> bool:
        """Whether so many draws of a chain are stored, and can be read."""
        counted = self.root["_sampling_state/draw_idx"][chain]
        for group, array in self._arrays():
            if self._is_moved(array) and made > counted:
                return False  # interrupted in a chunk: PyMC stores its state, but fills its draws
            # compound steps record only the last step's
            may_be_absent = array.basename.endswith("__model_logp")
            for part, n in self._parts(group, array, made):
                keys = _chunk_keys(part, chain)[: -(-n // part.chunks[1])]
                if not (may_be_absent or all(key in part.chunk_store for key in keys)):
                    return False
                if n and isinstance(_read(part, (chain, slice(n))), Damaged):
                    return False
        return True

    def join(self, made) -> None:
        """Put back the tuning draws that PyMC has moved; of each chain so many draws are kept."""
        for group, array in self._arrays():
            if not self._is_moved(array):
                continue
            shape = (self.chains, self.tune + self.draws, *array.shape[2:])
            values = np.full(shape, array.fill_value, array.dtype)
            for chain, n in enumerate(made):
                if n:  # else there may be damaged files
                    parts = self._parts(group, array, n)
                    values[chain, :n] = np.concatenate([part[chain, :k] for part, k in parts])
            attrs = array.attrs.asdict()
            new = self.root[group].array(
                array.basename,
                values,
                chunks=array.chunks,
                fill_value=array.fill_value,
                object_codec=(array.filters or [None])[0],
                compressor=array.compressor,
                overwrite=True,
            )
            new.attrs.update(attrs)
        for group in DRAWS:
            if f"warmup_{group}" in self.root:
                self.root[group].array(
                    "draw", np.arange(self.tune + self.draws), overwrite=True
                ).attrs.update({"_ARRAY_DIMENSIONS": ["draw"]})
                del self.root[f"warmup_{group}"]

    def clear(self, chain, made) -> None:
        """Remove what a chain has stored after its state: it may be damaged."""
        for _, array in self._arrays():
            for key in _chunk_keys(array, chain)[-(-made // array.chunks[1]) :]:
                array.chunk_store.pop(key, None)
        if not made:
            states = self.root["_sampling_state/sampling_state"]
            states.chunk_store.pop(states._chunk_key((chain,)), None)

    def last_draw(self, chain, made, names):
        """Values of these unknowns, and statistics, at a chain's last stored draw."""
        if not made:
            return {}, {}
        draws = {**self.root["posterior"], **self.root.get("unconstrained_posterior", {})}
        stats = {
            name: array[chain, made - 1]
            for name, array in self.root["sample_stats"].items()
            if array.ndim >= 2 and not name.endswith("warning")  # which would be logged again
        }
        return {name: draws[name][chain, made - 1] for name in names}, stats


def _read(array, selection):
    """Read a part of an array: None where nothing is, Damaged where it can't be read."""
    try:
        return array[selection]
    except Exception as error:  # whatever codecs raise
        if "NUMCODECS_ALLOW_UNSAFE_PICKLE_DECODE" in str(error):
            raise
        return Damaged(error)


def _chunk_keys(array, chain):
    """Return the keys of the files that hold a chain's draws, in their order."""
    rest = [0] * (array.ndim - 2)
    return [array._chunk_key((chain, i, *rest)) for i in range(array.cdata_shape[1])]
