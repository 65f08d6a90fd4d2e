"""What the graph of a PyMC model says. Knows no order of rows, no noise and no chains."""
