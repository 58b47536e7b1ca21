"""The agent of one datanode: it scans, stores trees, serves peers and repairs."""
