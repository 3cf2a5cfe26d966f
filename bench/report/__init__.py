"""The generator of docs/baseline.md: published, predicted and measured speed on one page."""
