"""Gradients of log-densities from minibatches. Imports `rows`, `models`, `loops`; knows no momentum."""
