"""What became of a model's graphs: counted, written to files, planned."""
