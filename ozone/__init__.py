"""Apache Ozone's disk layout and datanode protocol; no other package handles them."""
