"""Measurement and reporting of a run: recorder, trackers, console, status, report, audit and verify."""
