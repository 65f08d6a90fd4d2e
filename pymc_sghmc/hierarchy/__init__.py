"""Group effects as rewrites of a model: partially centred, or integrated out group by group."""
