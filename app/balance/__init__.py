"""Shares of work: decide from measured or given speeds how many microbatches each worker runs."""
