"""Processes and the wires between them: mesh, collectives, point-to-point, launching (floor 1)."""
