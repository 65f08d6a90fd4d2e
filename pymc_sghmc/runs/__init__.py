"""What leaves a process or outlives it. Knows no gradients and no formulas."""
