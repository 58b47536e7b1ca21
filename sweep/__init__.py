"""The sweep of a whole cluster: reads chunk tables and volumes, compares the replicas
of every container, and finds divergence down to the chunk. Does not depend on Spark.
"""
