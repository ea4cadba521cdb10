"""Programs of docs/migrate: each for another trainer, and for Steadfast."""
