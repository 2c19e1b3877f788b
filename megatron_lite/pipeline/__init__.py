"""Running a schedule: stages of the model and the executor of action lists (floor 4)."""
