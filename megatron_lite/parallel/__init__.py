"""Layers that know how to be cut, and the record of how each parameter is cut (floor 2)."""
