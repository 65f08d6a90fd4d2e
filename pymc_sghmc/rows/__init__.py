"""Arrays, and samplers of their rows."""
