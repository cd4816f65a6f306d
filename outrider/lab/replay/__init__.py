"""Replay: acceptance of the model-free drafters, predicted from logged prompts and answers alone."""
