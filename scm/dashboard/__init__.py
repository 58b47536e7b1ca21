"""The page of a controller: its cluster at a glance, in a browser."""
