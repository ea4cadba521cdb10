"""Decide how many microbatches each worker runs.

The decision follows from measured speeds or given weights.
"""
