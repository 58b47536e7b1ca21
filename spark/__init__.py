"""The sweep of a whole cluster: chunk rows to trees, replicas side by side, divergence
down to the chunk.
"""
