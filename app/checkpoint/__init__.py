"""State that outlives an attempt: what it is (state), where it lies (durable), how it comes back (restore)."""
