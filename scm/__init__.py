"""The controller: it compares the reported roots and sends reconcile commands."""
