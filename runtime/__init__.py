"""What every process needs: configuration, logs, metrics, retries, disk, RPC."""
