"""Ways to start a run: under Ray, under torchrun, on the head of a cluster, as a Ray job."""
