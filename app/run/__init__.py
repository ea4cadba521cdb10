"""What a run is on storage: its directory, who owns it, its ledger and its events."""
