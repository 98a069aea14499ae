"""Training steps in TensorFlow 2. Importing this package does not import TensorFlow: building a workload does."""
