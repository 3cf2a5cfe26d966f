"""`python -m fastbrain.sweep_arch`: what a training step of one shape costs on this machine."""
