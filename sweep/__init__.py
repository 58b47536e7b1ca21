"""The sweep of a whole cluster: chunk rows to trees, replicas compared, divergence
down to the chunk. Knows no Spark.
"""
