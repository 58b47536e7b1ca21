"""The agent on one datanode: scans, keeps trees, serves peers, repairs."""
