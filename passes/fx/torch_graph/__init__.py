"""Passes that place nodes in torch, and passes that only the graph that torch runs needs.

A session computes values. Torch's graph also has memory: strides, aliases and writes. These passes keep four
invariants:

1. **One layout per operator.** An operator reads all its images in channels_last, or all as they were traced.
2. **Strides are those of real kernels.** `ort_dynamo/torch_internals/kernels/kernel_layouts.py` lists the operators
   whose results are known to follow; a test runs the kernels. Fake tensors are never the proof.
3. **Aliases are read off the graph.** `passes/fx/analysis/aliases.py` goes by view operators and schemas. An unknown
   operator's results alias its inputs. No pass makes an input, an output or a saved tensor an alias of anything new.
4. **Fake values follow the graph.** No pass writes one by hand: `passes/fx/analysis/fake_values.py` propagates them.
"""
