"""Ready-made loaders of data that do not fit into memory: files, Zarr, HDF5, Parquet, and Dask.

A loader is passed as ``data`` to a sampler. It is any object with

- ``__len__``, the number of rows (or an attribute ``total_size``, which has precedence),
- ``__iter__``, which begins a new pass over the data and yields blocks: dicts of arrays with the
  same number of rows, by the names of the model's ``pm.Data``, or bare arrays if the model has one
  of these,
- optionally ``blocks(rng)``, the same in an order drawn by a NumPy generator,
- optionally ``buffer_rows``, the number of rows to hold in memory and shuffle at a time.

Blocks may have any number of rows. Rows should be in random order in the source. If they are not,
runs of similar rows must be short compared with ``buffer_rows``. Worker processes that are not
forked get the loader by pickling.
"""

from pymc_sghmc.rows.array_loader import ArrayLoader
from pymc_sghmc.rows.dask_loader import DaskLoader
from pymc_sghmc.rows.parquet_loader import ParquetLoader

__all__ = ["ArrayLoader", "DaskLoader", "ParquetLoader"]
