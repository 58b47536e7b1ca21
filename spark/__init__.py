"""The sweep on a Spark cluster: session, engine, SQL, data sources, executor pack."""
