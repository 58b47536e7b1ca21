"""The controller: compares roots from heartbeats and issues reconcile commands."""
