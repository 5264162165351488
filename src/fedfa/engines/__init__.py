"""Engines: how the clients of a round are trained."""
