"""What is measured before a scheme runs: thresholds for easd and parse, probes for semantic."""
