"""Reports about a model's graphs: counted, written to files, planned."""
