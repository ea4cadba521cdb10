"""One optimizer step of one rank, and what may be wrapped around the step."""
