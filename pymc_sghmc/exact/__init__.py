"""Samplers that need all data at each step."""
