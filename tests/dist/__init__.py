"""The same loop in real processes over gloo, held against one plain process. No Ray."""
