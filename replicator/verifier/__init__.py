"""The verifier: proves what a bucket holds, and writes beside it for its syncers."""
