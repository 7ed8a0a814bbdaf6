"""torch's operators and kernels: schemas, dtypes, layouts, formulas."""
