"""Options of torch.compile(backend="ort_train"): frozen groups, by the stage that reads them."""
