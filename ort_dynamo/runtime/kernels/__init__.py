"""Fused kernels: their code is compiled, stored, loaded and registered with sessions."""
