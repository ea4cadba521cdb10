"""Everything that touches Ray while a run is going on."""
