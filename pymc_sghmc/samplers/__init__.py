"""Samplers: one update rule each, and its own arguments. Imports `step`; knows no PyMC and no data."""
