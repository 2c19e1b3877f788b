"""GPT and LLaMA models that can be any stage of a pipeline (floor 3)."""
