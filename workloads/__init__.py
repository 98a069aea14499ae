"""The training steps: each a class with the shape of `bench.workload.Workload`, none knowing the harness."""
