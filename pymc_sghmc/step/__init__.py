"""PyMC's step protocol around any update rule."""
