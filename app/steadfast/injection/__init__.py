"""Faults that a configuration asks for, to test recovery."""
