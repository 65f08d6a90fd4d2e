"""Many inner steps in one compiled call, and many normals at once."""
