"""The page of a run: everything that its directory tells, in one HTML file that needs nothing."""
