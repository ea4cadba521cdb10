"""Detect, classify and inject faults of a step."""
