"""What a replica holds and what it lacks: values and pure functions, no I/O."""
