"""What the command line, the benchmarks and the evaluation share."""
