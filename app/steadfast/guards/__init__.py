"""Checks of the numbers of steps: spikes, values that are not finite, and silent corruption."""
