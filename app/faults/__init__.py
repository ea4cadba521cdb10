"""What can go wrong in a step."""
