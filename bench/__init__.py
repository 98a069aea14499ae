"""oombench: what it costs to make a training step fit on a GPU."""
