"""Token files, sample order and batches. Nothing here knows the mesh: a loader is told its dp rank and size."""
