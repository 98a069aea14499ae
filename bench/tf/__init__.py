"""TensorFlow's own allocator on the CPU, and what it says of a training step."""
