"""Which rows, of which arrays, in which order. Imports `models`; knows no gradients and no unknowns."""
