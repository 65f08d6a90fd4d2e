"""Samplers that need all data. Imports `models` and `runs`; knows no minibatches."""
