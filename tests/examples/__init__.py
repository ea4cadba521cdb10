"""User code as a user would write it; the shipped configurations name it by `target`."""
