"""A trainer's step on several ranks: data parallel, tensor parallel, pipelines."""
