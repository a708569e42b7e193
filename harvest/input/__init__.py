"""What is read, in which order: a prompts file, token ids, and the plan of windows and batches. Pure Python and numpy; no model."""
