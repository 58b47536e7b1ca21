"""A running Ozone cluster without agents: what its replicas hold, how they differ."""
