"""The replication master: policies, leases, and which syncer works on what."""
