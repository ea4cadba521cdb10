"""Workers of one attempt: process groups, control channel and progress."""
