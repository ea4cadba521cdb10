"""Reading of run directories: status, report, audit, comparison of runs, and the memory that a plan needs."""
