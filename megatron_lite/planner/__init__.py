"""What a run will need, computed before it starts: layer split, parameters, FLOPs, memory. No torch."""
