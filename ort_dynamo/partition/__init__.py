"""The partition cuts a joint graph into forward and backward."""
