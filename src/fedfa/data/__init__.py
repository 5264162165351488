"""Federations: clients' data, where they come from, and how they are divided."""
