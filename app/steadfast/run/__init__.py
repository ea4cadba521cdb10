"""Run on storage: directory, owner, ledger and events."""
