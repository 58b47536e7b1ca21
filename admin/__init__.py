"""The `treefold` command."""
