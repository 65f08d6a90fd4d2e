"""A loader of Dask's partitions that notes how much comes home from each pass over them."""

import pickle

from pymc_sghmc.loaders import DaskLoader


class CountedPartitions(DaskLoader):
    """Notes the sizes in bytes of what passes return."""

    def __init__(self, data):
        super().__init__(data)
        self.sizes = []

    def map_sum(self, task):
        found = super().map_sum(task)
        self.sizes.append(len(pickle.dumps(found)))
        return found
