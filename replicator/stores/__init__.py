"""Object stores behind narrow ports."""
