"""A syncer: follows one bucket and keeps another equal to it, for as long as it runs."""
