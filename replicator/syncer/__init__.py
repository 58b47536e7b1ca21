"""A syncer: it follows one bucket, and keeps another equal to it."""
