"""Hooks that the training loop calls: early stopping, the running average of weights, and a user's own."""
