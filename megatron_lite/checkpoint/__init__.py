"""Checkpoints without pickle that any layout can load: boxes, safetensors files and one JSON manifest (floor 4)."""
