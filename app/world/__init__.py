"""The workers of one attempt: their process groups, the control channel between them, and how far each has come."""
