"""The chunk table: schema, manifest, verified reader, writer, destinations."""
