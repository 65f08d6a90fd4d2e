"""Settings from measurements. Imports `gradients`; knows no protocol of PyMC's and no names of samplers."""
