"""Ways to start a run: Ray, torchrun, a remote head, a Ray job."""
