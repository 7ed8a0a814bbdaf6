"""The compile of one graph, from Dynamo's graph to sessions, and its events."""
