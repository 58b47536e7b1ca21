"""Options of the JVMs that tests start."""

# One that ends within a minute is over before its second compiler and the threads of
# its collector are worth their time, which is half of what Spark takes.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
