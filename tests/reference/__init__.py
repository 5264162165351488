"""Independent references: the same rules written another way, in float64, for the tests to hold the package to."""
