"""Hydra configuration groups: the workloads by name, and the sweeps."""
