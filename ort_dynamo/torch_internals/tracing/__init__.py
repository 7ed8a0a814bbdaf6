"""torch's front end: Dynamo's frames, graph breaks, wrappers and the program around a graph."""
