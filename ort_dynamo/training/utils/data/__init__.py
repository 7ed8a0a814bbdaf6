"""Samplers that give each process batches of like cost."""

from __future__ import annotations

from ort_dynamo.training.utils.data.sampler import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
