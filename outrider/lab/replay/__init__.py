"""Replay: acceptance of the model-free drafters, predicted from logged prompts and answers alone."""

from outrider.extras import check_lab

check_lab("replay")
