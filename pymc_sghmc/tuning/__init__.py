"""Settings from measurements: a Gaussian fit, the noise around it, and a bias budget."""
