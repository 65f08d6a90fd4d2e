"""Predictions of more rows than fit in memory."""
