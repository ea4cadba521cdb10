"""Checks of machines before a run: node facts, network measurements and findings."""
