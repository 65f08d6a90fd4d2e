"""Many steps in one call, and many normals at once. Knows no formulas and not what a gradient is."""
