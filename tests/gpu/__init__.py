"""Drills for one GPU: what can be known of CUDA and NCCL only by running them. README.md says how."""
