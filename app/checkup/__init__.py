"""Check machines before a run: what each is like (facts), how they connect (network), what is wrong (findings)."""
