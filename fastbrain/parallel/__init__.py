"""Several processes that train one model, as torchrun starts them: one for every card."""
