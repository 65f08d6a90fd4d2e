"""Stochastic-gradient samplers: one update rule a file, with the arguments of its own."""
