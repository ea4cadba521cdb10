"""Ways to start a run: on Ray, under torchrun, on the head of a cluster, or as a Ray job."""
