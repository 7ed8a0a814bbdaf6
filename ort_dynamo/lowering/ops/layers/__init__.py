"""Lowerings of attention, norms, embeddings, losses and recurrent layers."""
