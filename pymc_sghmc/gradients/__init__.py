"""Gradients of log-densities from minibatches, and the metrics of their coordinates."""
