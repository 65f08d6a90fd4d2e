"""PyMC's step protocol around any rule. Imports all wings below; knows no formula and no sampler."""
