"""From gradients to new weights: flat buckets, their reduction, norm and clip, AdamW, learning rate (floor 4)."""
