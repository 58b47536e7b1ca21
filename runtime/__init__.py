"""What each long-running process needs: configuration, logs, metrics, retries, RPC."""
