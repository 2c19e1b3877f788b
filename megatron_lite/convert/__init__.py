"""Models from and to Hugging Face folders, and from Megatron-LM's checkpoints (floor 5)."""
