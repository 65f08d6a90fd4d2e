"""From a finished run to the prior of the next one, on new data."""
