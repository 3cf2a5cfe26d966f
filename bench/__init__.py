"""Benchmarks of fastbrain, beside the peers its users would otherwise pick."""
