"""What a person runs: the command line, image generation, benchmarks, the built-in demo model."""
