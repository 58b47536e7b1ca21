"""All that knows Apache Ozone: its disk layout and its wire protocols."""
