"""Capture turns a Dynamo graph into the joint graph of forward and backward."""
