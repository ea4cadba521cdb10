"""Decisions on which workers are alive, hung or slow, and how long to wait for each."""
