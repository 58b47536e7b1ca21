"""The README's local cluster: processes on loopback, damaged and healed."""
